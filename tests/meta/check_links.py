#!/usr/bin/env python3
"""Checks the links of every Markdown file of the tree: the file and the heading that a link names exist.

check_links.py check [ROOT]      prints what is wrong and exits with 1 where anything is
check_links.py self-test [ROOT]  breaks each kind of link in a small tree and sees that it is noticed

Links to the web are not followed. `[name](docs/page.md#a-heading)` is right where docs/page.md has "## A heading".
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

# Folders that are no part of the tree, where git cannot be asked what is.
NOT_OURS = {".git", ".venv", "build"}
LINK = re.compile(r"(?<!\\)\]\(\s*<?([^()\s<>]+)>?(?:\s+\"[^\"]*\")?\s*\)|<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"")
MACHINE_PATH = re.compile(r"(?<![\w.~}$/:-])(?:/work/|/root/|/home/|/Users/|/mnt/|[A-Z]:\\)[\w.-]+|file://")


def pages_of(root):
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "*.md"], capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return sorted(path for path in (root / name for name in listed.stdout.splitlines()) if path.exists())
    return sorted(path for path in root.rglob("*.md") if not NOT_OURS & set(path.relative_to(root).parts))


def without_fences(text):
    """The text with empty lines in the place of code blocks, so that line numbers stay."""
    lines, fence = [], None
    for line in text.split("\n"):
        mark = re.match(r"\s*(```+|~~~+)", line)
        inside = fence is not None
        if mark and not inside:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = None
        lines.append("" if inside or mark else line)
    return "\n".join(lines)


def without_code(text):
    """The text with blanks in the place of code between backticks."""
    return re.sub(r"(?<!`)(`+)(?!`)((?:(?!\n\n).)*?)(?<!`)\1(?!`)", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)


def anchors(text):
    """The anchors of a page as GitHub makes them: small letters, no punctuation, hyphens for blanks, -1, -2 for repeats."""
    found = set()
    for heading in re.findall(r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t#]*$", without_fences(text), re.M):
        heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        base = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        anchor, repeats = base, 0
        while anchor in found:
            repeats += 1
            anchor = f"{base}-{repeats}"
        found.add(anchor)
    return found | set(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text))


def wrong_link(root, page, link):
    """Why a link of a page leads nowhere, or nothing."""
    if re.match(r"(https?|mailto):", link):
        return None
    name, _, anchor = link.partition("#")
    target = (page.parent / unquote(name)).resolve() if name else page
    if name.startswith("/") or not target.is_relative_to(root):
        return "leads out of the tree; use a path relative to the page"
    if not target.exists():
        return "no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
        return f"{target.relative_to(root)} has no such heading"
    return None


def check(root):
    for page in pages_of(root):
        text = page.read_text(encoding="utf-8")
        place = page.relative_to(root)
        prose = without_code(without_fences(text))
        for match in LINK.finditer(prose):
            link = match[1] or match[2]
            if why := wrong_link(root, page, link):
                yield f"{place}:{1 + prose[:match.start()].count(chr(10))}: {link}: {why}"
        for number, line in enumerate(text.split("\n"), 1):
            if path := MACHINE_PATH.search(line):
                yield f"{place}:{number}: {path[0]} is a path of one machine"


GOOD = """# The page, `v2`: it's *here*_x

## Again

## Again

[a](#the-page-v2-its-here_x) [b](#again-1) [c\nd](../README.md) `[no](link.md)` [web](https://example.org/x#y)

```sh
# No heading
[no](link.md)
```
"""
# What is written at the end of a page, and a piece of what is said about it.
BROKEN = {
    "[x](no-such-page.md)": "no such file",
    "[x\ny](no-such-page.md#a)": "no such file",
    "[x](#no-heading)": "no such heading",
    "[x](../README.md#no-such-heading-at-all)": "no such heading",
    "[x](#again-2)": "no such heading",
    "[`x`](/etc/hosts)": "leads out of the tree",
    "[x](../../elsewhere.md)": "leads out of the tree",
    '<img src="no-such-image.png">': "no such file",
    "see " + "/ho" + "me/somebody/pacer": "path of one machine",
}


def self_test(_):
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        (copy / "docs").mkdir()
        (copy / "README.md").write_text("# Title\n", encoding="utf-8")
        page = copy / "docs" / "page.md"
        page.write_text(GOOD, encoding="utf-8")
        yield from (f"refuses what is right: {problem}" for problem in check(copy))
        for text, why in BROKEN.items():
            page.write_text(GOOD + "\n" + text + "\n", encoding="utf-8")
            problems = list(check(copy))
            if len(problems) != 1 or why not in problems[0]:
                yield f"says {problems} of {text!r}, expected: {why}"


RULES = {"check": check, "self-test": self_test}


def main(rule, root="."):
    problems = list(RULES[rule](Path(root).resolve()))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
