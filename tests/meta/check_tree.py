#!/usr/bin/env python3
"""Keeps the house in order: rules about the source tree that a compiler does not check.

check_tree.py RULE [ROOT]       checks one rule; prints what breaks it and exits with 1
check_tree.py self-test [ROOT]  breaks each rule in a copy of the tree and expects it to be noticed
"""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Left to right: a folder may include those before it and itself.
LIBRARY = ("core", "files", "kernels", "device", "collectives", "compression", "modules", "optimizers",
           "hooks", "schedulers", "metrics", "parallel", "checkpoints", "session")
APART = {  # to the left, but none of its business
    "kernels": {"files"},
    "device": {"files"},
    "modules": {"files", "collectives", "compression"},
    "metrics": {"schedulers"},
    "parallel": {"compression", "schedulers", "metrics"},
    "checkpoints": {"schedulers", "metrics"},
}
FOLDERS = LIBRARY + ("examples", "benchmarks")
NEVER_TORCH = ("core", "files", "kernels")
ALL = {"metrics", "checkpoints", "session"}  # where FOLDER/FOLDER.h is the header of a class
BELOW = {"core", "files", "kernels"}  # what training programs have no use for, so that pacer.h does not bring it
PRIVATE = {"detail", "gloo_stubs", "cpu", "cuda"}  # folders whose headers are not installed
HEADERS = {".h", ".cuh"}
SUFFIXES = HEADERS | {".cpp", ".cu"}
LONGEST = 400
CLANG_FORMAT = 14  # other versions format differently

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
LOADERS = re.compile(r"\b(torch::load|torch::jit::load|torch::pickle_load|pickle_load|system|popen|dlopen)\s*\(")

FRAGMENT = re.compile(r"\s*// *(As|At|Beside|By|Of|Over) ")


def sources(root, folders=LIBRARY):
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                yield folder, path


def code(path):
    """The text without comments and with its lines kept; strings stay, as includes are read from them."""
    text = path.read_text(encoding="utf-8")
    pattern = r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'\\?[^\n]'"""
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]) if m[0][0] == "/" else m[0], text, flags=re.S)


def includes(path):
    text = code(path)
    for found in INCLUDE.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[1], found[2]


def is_public(root, path):
    return path.suffix == ".h" and not PRIVATE & set(path.relative_to(root).parts)


def edges(root):
    """Folders include only those to their left, always by the spelling <pacer/FOLDER/FILE.h>."""
    for folder, path in sources(root, FOLDERS):
        allowed = FOLDERS[: FOLDERS.index(folder) + 1]
        for line, mark, name in includes(path):
            where = f"{path.relative_to(root)}:{line}"
            parts = name.split("/")
            if ".." in parts:
                yield f"{where}: includes {name} by a relative path"
            elif parts[0] == "pacer" and len(parts) == 2:
                if folder in LIBRARY:
                    yield f"{where}: a library folder must not include <{name}>, which includes all folders"
            elif parts[0] == "pacer" and (parts[1] not in allowed or parts[1] in APART.get(folder, ())):
                yield f"{where}: {folder} must not include {parts[1]}"
            elif mark == '"' and folder in LIBRARY:
                yield f'{where}: write <pacer/...> instead of "{name}"'


def torch_free(root):
    """No LibTorch in core, files and kernels, nor in any CUDA file."""
    for folder, path in sources(root, FOLDERS):
        if folder in NEVER_TORCH or path.suffix in {".cu", ".cuh"}:
            for line, _, name in includes(path):
                if TORCH.match(name):
                    yield f"{path.relative_to(root)}:{line}: includes {name}, but must not know LibTorch"


def detail(root):
    """No public header includes one that is not installed."""
    for _, path in sources(root):
        if is_public(root, path):
            for line, _, name in includes(path):
                if name.startswith("pacer/") and PRIVATE & set(name.split("/")):
                    yield f"{path.relative_to(root)}:{line}: a public header includes {name}, which is not installed"


def umbrellas(root):
    """FOLDER/FOLDER.h, or FOLDER/all.h, includes every public header of its folder, and pacer.h every umbrella of those that
    training programs use."""
    folders = [folder for folder in LIBRARY if any(is_public(root, path) for _, path in sources(root, (folder,)))]
    umbrella_of = {folder: Path(folder) / ("all.h" if folder in ALL else f"{folder}.h") for folder in folders}
    wanted = {Path("pacer.h"): {f"pacer/{umbrella_of[folder]}" for folder in folders if folder not in BELOW}}
    for folder, umbrella in umbrella_of.items():
        headers = (path for _, path in sources(root, (folder,)) if is_public(root, path))
        wanted[umbrella] = {f"pacer/{path.relative_to(root)}" for path in headers} - {f"pacer/{umbrella}"}
    for umbrella, names in wanted.items():
        if not (root / umbrella).exists():
            yield f"{umbrella}: is missing"
            continue
        found = {name for _, _, name in includes(root / umbrella)}
        for name in sorted(names - found):
            yield f"{umbrella}: does not include <{name}>"


def loaders(root):
    """The library runs no other program, and loads no code and no pickle: what it reads cannot execute."""
    for _, path in sources(root):
        for number, line in enumerate(code(path).split("\n"), 1):
            if found := LOADERS.search(line):
                yield f"{path.relative_to(root)}:{number}: calls {found[1]}"


def length(root):
    """Files stay short enough to be read at once."""
    for _, path in sources(root):
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > LONGEST:
            yield f"{path.relative_to(root)}: has {lines} lines, more than {LONGEST}"


def sentences(root):
    """No comment in a header opens with a preposition: readers would look for what it speaks of.

    "At most 8 elements." is refused, too: "Takes at most 8 elements." says who is meant. Words behind code may be short.
    """
    for _, path in sources(root):
        if path.suffix not in HEADERS:
            continue
        before = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            goes_on = before.find("//") == line.find("//")  # also below a comment behind code
            if not goes_on and (found := FRAGMENT.match(line)):
                yield f'{path.relative_to(root)}:{number}: a comment begins with "{found[1]}"; write a sentence with a subject'
            before = line


def formatter():
    program = shutil.which(f"clang-format-{CLANG_FORMAT}") or shutil.which("clang-format")
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout if program else ""
    return program if f"version {CLANG_FORMAT}." in version else None


def formatting(root):
    """Everything is formatted by .clang-format."""
    program = formatter()
    if not program:
        print(f"PACER_SKIPPED: no clang-format {CLANG_FORMAT}")
        return
    files = [str(path) for _, path in sources(root, FOLDERS + ("tests",))]
    run = subprocess.run([program, "--dry-run", "--ferror-limit=1", *files], capture_output=True, text=True)
    for found in re.finditer(r"^(.+?):(\d+):\d+: .*clang-format-violations", run.stderr, re.M):
        yield f"{Path(found[1]).relative_to(root)}:{found[2]}: is not formatted; run clang-format -i on it"


RULES = {"edges": edges, "torch-free": torch_free, "detail": detail, "umbrellas": umbrellas, "loaders": loaders,
         "length": length, "sentences": sentences, "format": formatting}

# What breaks each rule: rule, file, text put at its end.
BREAKS = (
    ("edges", "core/broken.h", "#include <pacer/kernels/kernels.h>\n"),
    ("edges", "kernels/broken.cpp", '  #  include "pacer/optimizers/optimizers.h"\n'),
    ("edges", "kernels/broken.cpp", "#include <pacer/pacer.h>\n"),
    ("edges", "kernels/broken.cpp", '#include "broken.h"\n'),
    ("edges", "modules/broken.cpp", "#include <pacer/collectives/communicator.h>\n"),
    ("edges", "optimizers/detail/broken.h", '#include "../broken.h"\n'),
    ("edges", "kernels/broken.cpp", "#include <pacer/files/files.h>\n"),
    ("edges", "hooks/broken.cpp", "#include <pacer/session/session.h>\n"),
    ("edges", "parallel/broken.cpp", "#include <pacer/metrics/metrics.h>\n"),
    ("torch-free", "core/broken.cpp", "#include <ATen/core/Tensor.h>\n"),
    ("torch-free", "kernels/cpu/broken.cpp", "#include <torch/types.h>\n"),
    ("torch-free", "optimizers/broken.cu", "#include <c10/util/Half.h>\n"),
    ("detail", "optimizers/broken.h", "#include <pacer/optimizers/detail/broken.h>\n"),
    ("umbrellas", "core/broken.h", "#pragma once\n"),
    ("umbrellas", "schedulers/broken.h", "#pragma once\n"),
    ("umbrellas", "session/broken.h", "#pragma once\n"),
    ("loaders", "optimizers/broken.cpp", "void f() { torch::load(x, y); }\n"),
    ("loaders", "core/broken.cpp", "int f() { return std::system (x); }\n"),
    ("length", "core/broken.cpp", "\n" * (LONGEST + 1)),
    ("sentences", "core/broken.h", "// Of all tensors.\nint f();\n"),
    ("sentences", "kernels/cuda/broken.cuh", "int f();  // of one\n  // As the other does.\n  int g();\n"),
    ("format", "tests/unit/broken.cpp", "int  f( ) ;\n"),
)
# What must not be taken for a break.
FINE = (
    ("torch-free", "core/fine.cpp", "// #include <torch/types.h>\n"),
    ("loaders", "core/fine.cpp", "/* system(x) */ int file_system(int);\n"),
    ("edges", "optimizers/fine.cpp", "#include <pacer/core/core.h>\n#include <torch/types.h>\n"),
    ("sentences", "core/fine.h", "// Counts elements.\n// Of all tensors.\nint f();  // Of some\n          // Of all\n"),
    ("sentences", "core/fine.h", "// Offers elements.\nint f();  // By name\n"),
    ("sentences", "core/fine.cpp", "// Of all tensors.\nint f();\n"),
)


def self_test(root):
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        for part in FOLDERS + ("tests",):
            if (root / part).exists():
                shutil.copytree(root / part, copy / part)
        for part in ("pacer.h", ".clang-format"):
            shutil.copy(root / part, copy)
        rules = {rule: check for rule, check in RULES.items() if rule != "format" or formatter()}
        before = {rule: set(check(copy)) for rule, check in rules.items()}
        for expected, examples in ((True, BREAKS), (False, FINE)):
            for rule, name, text in examples:
                if rule not in rules:
                    continue
                planted = copy / name
                planted.parent.mkdir(parents=True, exist_ok=True)
                planted.write_text(text)
                noticed = bool(set(RULES[rule](copy)) - before[rule])
                planted.unlink()
                if noticed != expected:
                    yield f"{rule}: {'did not notice' if expected else 'complains about'} {name} with {text[:60]!r}"


def main(rule, root="."):
    root = Path(root).resolve()
    problems = list((self_test if rule == "self-test" else RULES[rule])(root))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
