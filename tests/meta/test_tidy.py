#!/usr/bin/env python3
"""test_tidy.py ROOT: plants defects in a small tree; tidy.py finds them with the checks of ROOT's .clang-tidy."""
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tidy

BAD = "inline int {}(bool b) {{\n  if (b);\n  return 1;\n}}\n"  # the defect is in the second line
TREE = {
    # A header is found through the link in the build folder or beside the file that includes it.
    "core/linked.h": BAD.format("linked"),
    "core/beside.h": BAD.format("beside"),
    "core/zero.cpp": '#include <pacer/core/linked.h>\n#include "beside.h"\n'
                     "int part(int n) {\n  int p = 0;\n  if (n > 0) p = n;\n  return 2 / p;\n}\n",
    "core/fine.cpp": "int thrice(int n) { return 3 * n; }\n",
    "session/first.cpp": BAD.format("first"),
    "session/second.h": "#pragma once\nint second(int);\n",
    "session/second.cpp": "#include <pacer/session/second.h>\nint second(int n) { return n; }\n",
    "session/third.h": "#pragma once\nint third(int);\n",
    "session/fourth.cpp": "#include <pacer/session/third.h>\nint fourth(int n) { return third(n); }\n",
    "session/cuda.cu": "",
}
SEMICOLON = "bugprone-suspicious-semicolon"
PLANTED = {"core": {("core/linked.h:2", SEMICOLON), ("core/beside.h:2", SEMICOLON),
                    ("core/zero.cpp:6", "clang-analyzer-core.DivideZero")},
           "session": {("session/first.cpp:2", SEMICOLON)}}
COMPILED = (("core", ["core/zero.cpp", "core/fine.cpp"]), ("session", ["session/first.cpp", "session/second.cpp"]),
            ("session", ["session/fourth.cpp"]), ("session", ["session/cuda.cu"]), ("tests", ["core/fine.cpp"]))
problems = []


def expect(what, got, wanted):
    if got != wanted:
        problems.append(f"{what}: expected {wanted}, got {got}")


def plant(top, config):
    """Writes the tree and the build folder: links to the folders, commands, and texts of several files."""
    root, build = top / "tree", top / "build"
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copy(config, root)
    (build / "include/pacer").mkdir(parents=True)
    entries = []
    for number, (folder, sources) in enumerate(COMPILED):
        link = build / "include/pacer" / folder
        if not link.exists():
            link.symlink_to(root / folder)
        main = root / sources[0]
        if len(sources) > 1:
            main = build / f"unity_{number}.cxx"
            main.write_text("".join(f'#include "{root / source}"\n' for source in sources))
        # The planted semicolon is for a check of clang-tidy to find; -Wno-restrict is a flag that clang does not know.
        flags = f"-Wno-empty-body -I{build / 'include'} -Wall -Wno-restrict -std=c++20"
        command = f"ccache c++ {flags} -o {folder}/x.o -c {main}"
        entries.append({"directory": str(build), "file": str(main), "command": command})
    (build / "compile_commands.json").write_text(json.dumps(entries))
    return root, build


def run(*words):
    """Returns the exit code of a run, the places and checks of its findings, and all that it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = tidy.main([str(word) for word in words])
    found = re.findall(r"^(\S+:\d+): .* \[(\S+?)(?:,\S+)?\]$", printed.getvalue(), re.M)
    return code, set(found), printed.getvalue()


def commit(root):
    git = ["git", "-C", root, "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)


def test_filter(config):
    """.clang-tidy knows each folder in both spellings of its headers, and none but these."""
    headers = re.search(r"^HeaderFilterRegex: '(.*)'$", config.read_text(), re.M)[1]
    for folder in tidy.FOLDERS:
        for name in (f"/tree/{folder}/x.h", f"/tree/build/ci/include/pacer/{folder}/detail/x.h"):
            expect(f"the filter of headers and {name}", bool(re.search(headers, name)), True)
    expect("the filter of headers and others", bool(re.search(headers, "/usr/include/stdio.h")), False)


def test_choice(root, build):
    """A changed header is looked at through its source file, or one that includes it; what is left out is named."""
    made = list(tidy.batches(build, root))
    found = [[str(source) for source in sources] for _, sources in made]
    expect("sources", found, [sources for _, sources in COMPILED[:3]])
    for names, most, wanted, left in (
            ([], 9, [], []), (["session/first.cpp"], 9, ["session/first.cpp"], []),
            (["session/second.h"], 9, ["session/second.cpp"], []), (["session/third.h"], 9, ["session/fourth.cpp"], []),
            (["session/gone.cpp", "README.md", "session/cuda.cu"], 9, [], []),
            (["session/first.cpp", "session/second.cpp", "session/third.h"], 1,
             ["session/first.cpp", "session/second.cpp"], ["session/fourth.cpp"])):
        chosen, left_out = tidy.choose(root, made, {Path(name) for name in names}, most)
        found = [str(source) for _, sources in chosen for source in sources]
        expect(f"the choice for {names}", found, COMPILED[0][1] + wanted)
        expect(f"what is left out for {names}", sorted(map(str, left_out)), left)
    for now, names, wanted in ((0, [], ["core/zero.cpp"]), (1, [], ["core/fine.cpp"]), (2, [], []),
                               (2, ["core/linked.h"], ["core/zero.cpp"])):
        chosen, _ = tidy.choose(root, made, {Path(name) for name in names}, 9, now)
        expect(f"turn {now} with {names}", [str(source) for _, sources in chosen for source in sources], wanted)


def test_runs(root, build):
    code, found, said = run(build, root)
    expect("a tree without history", (code, found, "git does not tell" in said), (1, PLANTED["core"], True))
    code, found, _ = run(build, root, "--all")
    expect("all", (code, found), (1, PLANTED["core"] | PLANTED["session"]))
    code, found, _ = run(build, root, "--only", "session/s")
    expect("a file without defects", (code, found), (0, set()))

    if shutil.which("git"):
        subprocess.run(["git", "-C", root, "init", "-q", "-b", "main"], check=True)
        commit(root)
        expect("a single commit", run(build, root)[:2], (1, PLANTED["core"]))
        (root / "session/first.cpp").write_text(TREE["session/first.cpp"] + "// changed\n")
        commit(root)
        # It is the second, so it is the turn of the third file of folders without LibTorch, of which there is none.
        expect("the last commit", run(build, root)[:2], (1, PLANTED["session"]))
        expect("since a commit", run(build, root, "--since", "HEAD")[:2], (0, set()))

    for folder in ("core", "session"):
        for name in TREE:
            (root / name).write_text("// nothing\n" if name.startswith(folder) else (root / name).read_text())
    expect("a tree without defects", run(build, root, "--all")[:2], (0, set()))
    (root / ".venv").mkdir()
    (root / ".venv/foreign.h").write_text("#error\n")
    (root / "session/fourth.cpp").write_text('#include "../.venv/foreign.h"\n')
    code, _, said = run(build, root, "--all")
    noticed = "PACER_SKIPPED: " in said, "not looked at: session/fourth.cpp" in said
    expect("a header of others", (code, *noticed), (0, True, True))
    (root / "core/fine.cpp").write_text("int f() { return nowhere; }\n")
    expect("an error", run(build, root)[0], 1)


def main(root):
    config = Path(root).resolve() / ".clang-tidy"
    test_filter(config)
    if not tidy.linter():
        print(f"PACER_SKIPPED: no clang-tidy {tidy.CLANG_TIDY}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            root, build = plant(Path(folder).resolve(), config)
            test_choice(root, build)
            test_runs(root, build)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
