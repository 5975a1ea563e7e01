#!/usr/bin/env python3
"""Writes the API reference as HTML, by Doxygen, from the comments of the public headers, README.md and the pages in docs.

reference.py build OUT [ROOT]      writes OUT/html; prints what Doxygen warns of and exits with 1 where there is anything
reference.py check OUT [ROOT]      the same as a test, which is skipped where there is no Doxygen
reference.py self-test OUT         rewrites a small header and compares; breaks it, and expects that to be noticed

Doxygen reads a copy in OUT/source, whose comments doxygen_text.py has rewritten; warnings name lines of the tree.
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

from check_tree import LIBRARY, is_public
from doxygen_text import Header, page_text
from options_page import read_tree

CONFIG = Path(__file__).with_name("Doxyfile")
# What needs no comment: fields and accessors, whose names say all, aliases in a class, and the element math, which is for
# those who write kernels.
OBVIOUS = re.compile(r"^(kernels/math/|core/host_device\.h)|Member \w+ \(variable\)|"
                     r"Member \w+\(\) const( override| =0)? \(function\)|\(typedef\) of (class|struct)")
NAMESPACES = """/** \\namespace pacer
 * Everything that pacer has. */
/** \\namespace pacer::modules
 * Modules: layers, and what acts on them. */
/** \\namespace pacer::kernels
 * The kernels on raw pointers, without LibTorch. */
"""
STYLE = "table.markdownTable th a, table.markdownTable th a:visited { color: inherit; }\n"  # else blue on blue


def sources(root):
    """The headers and pages: of each its path, its text for Doxygen, and the source's line of each of its lines."""
    headers = [path for folder in LIBRARY for path in sorted((root / folder).rglob("*.h")) if is_public(root, path)]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    names = [str(path.relative_to(root)) for path in [root / "pacer.h", *headers, *pages]]
    tree, _ = read_tree(root)
    for name in names:
        text = (root / name).read_text(encoding="utf-8")
        if name.endswith(".h"):
            header = Header(name, text, tree)
            yield f"pacer/{name}", "\n".join(header.lines), header.sources
        else:
            yield name, page_text(name, text, set(names)), range(1, text.count("\n") + 2)


def build(out, root):
    """Writes the reference and yields what is wrong with its source."""
    if not shutil.which("doxygen"):
        yield "the reference needs Doxygen; please install it (apt-get install --no-install-recommends doxygen)"
        return
    source, log = out / "source", out / "warnings.txt"
    for folder in (source, out / "html"):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    lines = {}
    for name, text, numbers in sources(root):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
        lines[name] = numbers
    (source / "namespaces.dox").write_text(NAMESPACES, encoding="utf-8")
    (source / "style.css").write_text(STYLE, encoding="utf-8")
    config = CONFIG.read_text(encoding="utf-8") + f"""
INPUT = "{source}"
OUTPUT_DIRECTORY = "{out}"
STRIP_FROM_PATH = "{source}/pacer" "{source}"
STRIP_FROM_INC_PATH = "{source}"
IMAGE_PATH = "{root}/docs/images"
HTML_EXTRA_STYLESHEET = "{source}/style.css"
WARN_LOGFILE = "{log}"
"""
    done = subprocess.run(["doxygen", "-"], input=config, text=True, capture_output=True, check=False)
    if done.returncode:
        yield f"doxygen ended with {done.returncode}"
    for line in dict.fromkeys((done.stdout + done.stderr + log.read_text(encoding="utf-8")).splitlines()):
        if found := re.match(rf"{re.escape(str(source))}/(.+?):(\d+): (?:warning: |error: )?(.*)", line):
            name, number = found[1], int(found[2])
            if name in lines and 0 < number <= len(lines[name]):
                number = lines[name][number - 1]
            line = f"{name.removeprefix('pacer/')}:{number}: {found[3]}"
        # Specialisations in std are left out, which Doxygen mentions.
        if not (line.endswith(" is not documented.") and OBVIOUS.search(line)) and "scope for class std::" not in line:
            yield line
    yield from unread(out)


def unread(out):
    """Pages that show what Doxygen should have read, of which it does not warn."""
    for path in sorted((out / "html").glob("*.html")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"<(script|pre|code)\b.*?</\1>|<div class=\"fragment\">.*?</div><!-- fragment -->", "", text, flags=re.S)
        text = re.sub(r"<[^>]*>", "", text)
        if found := re.search(r"[^\n]{0,40}(@ref|&lt;tt&gt;|`|\*\*(?!&quot;|\")|\\[^\w\s]|\{#)[^\n]{0,40}", text):
            yield f"{path.name}: shows {found[0]!r}"


def check(out, root):
    if not shutil.which("doxygen"):
        print("PACER_SKIPPED: no doxygen")
        return ()
    return build(out, root)


HEADER = """// A part.
//
//   Part part(/*size=*/3);  // three
//
// Takes <T>, 3 % of a@b, #1 and 2 * 3 * 4.
#pragma once

namespace pacer {

// Which way.
enum class Way {
  fast,  // a loop,
         // unrolled
  slow,
};

struct PartOptions {
  // Elements, >= 1.
  TORCH_ARG(int64_t, size) = 3;
};

class Part {
 public:
  explicit Part(const PartOptions& options);
  Part(const Part&) = delete;

  // Adds "x // y" {.
  void add(int x);
  void add(char x) {  // no words of a member
    if (x == '{') add(1);
  }
  bool is_added() const;
  int size = 0;  // elements

 private:
  // Nobody sees this.
  int size_;
};
TORCH_MODULE(Part);

}  // namespace pacer
"""
EXPECTED = r"""/// \file
/// \code{.cpp}
/// Part part(/*size=*/3);  // three
/// \endcode
/// Takes \<T\>, 3 \% of a\@b, \#1 and 2 \* 3 \* 4.
/// Which way.
/// a loop,
/// unrolled
/// Elements, \>= 1.
/// Default: `3`.
  PartOptions& size(const int64_t& value);
/// Makes one of these arguments.
/// Adds "x // y" {.
/// The header groups it with add(): see there.
/// elements
  int size = 0;
class Part : public torch::nn::ModuleHolder<PartImpl> {};
"""
# What is in the HTML of the header above.
SHOWN = {"classpacer_1_1Part.html": ("A part.", "/*size=*/3", "3 % of a@b, #1 and 2 * 3 * 4.", "pacer/modules/part.h"),
         "structpacer_1_1PartOptions.html": ("Elements, &gt;= 1.", "Default: ")}
PAGE = "# Title\n\nSee [part](../modules/part.h), [below](#the-end), [the code](../modules/part.cpp).\n\n## The `end`?\n"
# What Doxygen shows as it is, unless page_text() changes it.
PAGE_WORDS = """- See [the
  `part`](../modules/part.h).
- **`A`.** Or `b='c'`, and `**`, a@b.

## The `end`
"""
EXPECTED_PAGE = ("# Title {#page-page}\n\nSee [part](@ref modules/part.h), [below](@ref page-page-the-end), the code.\n\n"
                 "## The end? {#page-page-the-end}\n")


def small_tree(root, header):
    shutil.rmtree(root, ignore_errors=True)
    for folder in (*LIBRARY, "docs/images", "docs/figures"):
        (root / folder).mkdir(parents=True)
    files = {"pacer.h": "// All.\n#pragma once\n", "README.md": "# pacer\n\nA [page](docs/page.md#the-end).\n",
             "docs/page.md": "# Page\n\n" + PAGE_WORDS, "modules/part.h": header,
             "docs/figures/page.md": "# Figures\n\nOf the [page](../page.md#the-end).\n\n## The end\n"}
    for name, text in files.items():
        (root / name).write_text(text, encoding="utf-8")


def self_test(out, _):
    small_tree(out / "tree", HEADER)
    tree, _ = read_tree(out / "tree")
    lines = Header("modules/part.h", HEADER, tree).lines
    for line in EXPECTED.splitlines():
        if line not in lines and f"  {line}" not in lines:
            yield f"the header lacks: {line}"
    if any("Nobody" in line or "delete" in line for line in lines):
        yield "shows what is private or deleted"
    if (text := page_text("docs/page.md", PAGE, {"modules/part.h", "docs/page.md"})) != EXPECTED_PAGE:
        yield f"rewrites the page as {text}"
    if not shutil.which("doxygen"):
        return
    for problem in build(out, out / "tree"):
        yield f"warns of: {problem}"
    for name, words in SHOWN.items():
        html = re.sub(r"<[^>]*>", "", (out / "html" / name).read_text(encoding="utf-8"))
        for text in words:
            if text not in html:
                yield f"{name} lacks: {text}"
    for old, new, where in (("  // Adds ", "\n  void remove();\n  // Adds ", "modules/part.h:28: Member remove"),
                            ("// Which way.\n", "", "modules/part.h:10: Member Way"),
                            ("struct Part", "struct Other {\n  int x;\n};\nstruct Part", "Compound pacer::Other")):
        small_tree(out / "tree", HEADER.replace(old, new))
        problems = list(build(out, out / "tree"))
        if not any(where in problem for problem in problems):
            yield f"does not notice {new.strip()!r} for {old.strip()!r}, only {problems}"


RULES = {"build": build, "check": check, "self-test": self_test}


def main(rule, out, root="."):
    problems = list(RULES[rule](Path(out).resolve(), Path(root).resolve()))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
