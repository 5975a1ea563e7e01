#!/usr/bin/env python3
"""The version of a release, which stands in more files than one.

release.py check [ROOT]           they all say what CMakeLists.txt says, and the changelog can be cut
release.py set VERSION [ROOT]     writes it everywhere, and cuts the changelog: what is unreleased becomes that version's
release.py self-test [ROOT]       expects each mistake to be noticed, in a copy
"""
import datetime
import re
import shutil
import sys
import tempfile
from pathlib import Path

NUMBER = r"(\d+\.\d+\.\d+)"
PLACES = [  # the first is the one that the others follow
    ("CMakeLists.txt", r"project\(pacer VERSION " + NUMBER),
    ("CITATION.cff", r"^version: " + NUMBER + "$"),
    ("python/pyproject.toml", r'^version = "' + NUMBER + '"$'),
    ("python/pacer/__init__.py", r'^__version__ = "' + NUMBER + '"$'),
    ("docs/citing.md", r"^  version = \{" + NUMBER + r"\},$"),
    ("docs/installing.md", r"pacer-" + NUMBER + r"-linux"),
    ("docs/installing.md", r"libpacer-dev_" + NUMBER + r"_amd64"),
]
CHANGELOG, UNRELEASED = "docs/changelog.md", "## Unreleased"
RELEASE = re.compile(r"^## " + NUMBER + r" \(\d{4}-\d{2}-\d{2}\)$", re.M)
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")  # of Keep a Changelog


def numbers(root, name, pattern):
    return re.findall(pattern, (root / name).read_text(encoding="utf-8"), re.M)


def check_kinds(text):
    """Each version of a changelog has its entries below headings of level 3, the kinds of change, each at most once."""
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        version, *body = section.splitlines()
        seen = []
        for line in body:
            kind = line.removeprefix("### ")
            if kind == line:
                if line.startswith("- ") and not seen:
                    yield f"{CHANGELOG}: an entry of '{version}' stands before the first '### {KINDS[0]}', '### {KINDS[1]}' or '### {KINDS[4]}'"
                    break
                continue
            if kind not in KINDS:
                yield f"{CHANGELOG}: '### {kind}' is not one of {', '.join(KINDS)}"
            if kind in seen:
                yield f"{CHANGELOG}: '{version}' has '### {kind}' twice"
            seen.append(kind)


def check(root):
    """What is wrong, a line each."""
    found = numbers(root, *PLACES[0])
    if len(found) != 1:
        return [f"{PLACES[0][0]} has no version of the form 1.2.3"]
    wrong = []
    for name, pattern in PLACES[1:]:
        others = set(numbers(root, name, pattern))
        if others != set(found):
            said = " and ".join(sorted(others)) or "no version"
            wrong.append(f"{name} has {said}, but {PLACES[0][0]} has {found[0]}; tests/meta/release.py set VERSION writes all of them")
    text = (root / CHANGELOG).read_text(encoding="utf-8")
    headings = re.findall(r"^## .*$", text, re.M)
    if not headings or headings[0] != UNRELEASED:
        wrong.append(f"{CHANGELOG} does not begin with '{UNRELEASED}', where a change is written down before its release")
    wrong += [f"{CHANGELOG}: '{heading}' is not of the form '## 1.2.3 (2026-01-31)'" for heading in headings[1:] if not RELEASE.match(heading)]
    return wrong + list(check_kinds(text))


def put(root, version):
    for name, pattern in PLACES:
        path = root / name
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(pattern, lambda m: m[0].replace(m[1], version), text, flags=re.M), encoding="utf-8")
    path = root / CHANGELOG
    cut = f"{UNRELEASED}\n\n## {version} ({datetime.date.today()})"
    path.write_text(path.read_text(encoding="utf-8").replace(UNRELEASED, cut, 1), encoding="utf-8")


def self_test(root):
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)

        def fresh():
            for name in {name for name, _ in PLACES} | {CHANGELOG}:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, copy / name)

        for name, pattern in PLACES[1:]:
            fresh()
            text = (copy / name).read_text(encoding="utf-8")
            (copy / name).write_text(re.sub(pattern, lambda m: m[0].replace(m[1], "9.8.7"), text, flags=re.M), encoding="utf-8")
            assert any(line.startswith(name) and "9.8.7" in line for line in check(copy)), name
        fresh()
        (copy / CHANGELOG).write_text("# Changelog\n\n## Soon\n", encoding="utf-8")
        assert any("does not begin with" in line for line in check(copy))
        fresh()
        put(copy, "1.2.3")
        assert check(copy) == [], check(copy)
        assert numbers(copy, *PLACES[0]) == ["1.2.3"]
        text = (copy / CHANGELOG).read_text(encoding="utf-8")
        assert RELEASE.search(text)[1] == "1.2.3"
        assert not text.split(UNRELEASED, 1)[1].split("## ", 1)[0].strip(), "what is unreleased after a cut is empty, without headings"
        kept = (root / CHANGELOG).read_text(encoding="utf-8").split(UNRELEASED, 1)[1]
        assert text.endswith(")" + kept), "a cut changes nothing below it"
        for entries, words in (("- this\n", "stands before"), ("### New\n", "is not one of"), ("### Added\n- this\n\n### Added\n", "twice")):
            (copy / CHANGELOG).write_text(f"{UNRELEASED}\n\n{entries}", encoding="utf-8")
            assert any(words in line for line in check(copy)), words
        (copy / CHANGELOG).write_text(f"{UNRELEASED}\n\n## 1.2.3 of May\n", encoding="utf-8")
        assert any("is not of the form" in line for line in check(copy))


def main():
    arguments = sys.argv[1:]
    rule = arguments.pop(0) if arguments else ""
    version = arguments.pop(0) if rule == "set" and arguments else None
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[2]
    if rule == "set" and version and re.fullmatch(NUMBER, version):
        put(root, version)
    elif rule == "self-test":
        self_test(root)
    elif rule != "check":
        sys.exit(__doc__)
    wrong = check(root)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
