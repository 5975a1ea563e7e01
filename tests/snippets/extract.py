#!/usr/bin/env python3
"""Writes every complete C++ program of the README and the docs into a folder, so that the build compiles them.

extract.py ROOT OUTPUT    prints two CMake lists, a line each: programs that become one, and programs that stay alone

A program is a ```cpp block with a main function; other blocks are fragments and are left to the reader. Those that
include all of LibTorch are functions of one program, each in a namespace of its own, because LibTorch's headers are
most of what each would take to compile. Whether one of them lacks a header of pacer does not show there, so the names
that it uses are looked for in its headers. The others may lack one of LibTorch's, which only shows alone.
"""
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```cpp\n(.*?)^```", re.M | re.S)
INCLUDE = re.compile(r"^#include <([^>]+)>\n", re.M)
COMMENT = re.compile(r"//.*")
NAME = re.compile(r"\bpacer::(\w+)")


def text_of(root, headers, seen):
    """What these headers of pacer declare, and those that they include."""
    new = [header for header in headers if header.startswith("pacer/") and header not in seen]
    seen.update(new)
    texts = [COMMENT.sub("", (root / header.removeprefix("pacer/")).read_text(encoding="utf-8")) for header in new]
    return "".join(text + text_of(root, INCLUDE.findall(text), seen) for text in texts)


def undeclared(root, program):
    """The names in pacer that the program uses, and none of its headers knows."""
    known = set(re.findall(r"\w+", text_of(root, INCLUDE.findall(program), set())))
    return set(NAME.findall(program)) - known


def end_of_block(text, begin):
    """The place of the brace that closes the first one behind `begin`."""
    depth = 0
    for place in range(text.index("{", begin), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError("a program whose braces do not match")


def as_function(name, program, line, page):
    """The program as a function NAME::program(), its lines numbered as on the page."""
    includes = INCLUDE.findall(program)
    body = INCLUDE.sub("\n", program)
    end = end_of_block(body, body.index("int main("))
    body = (body[:end] + "return 0; " + body[end:]).replace("int main(", "int program(", 1)
    head = "".join(f"#include <{header}>\n" for header in includes)
    return f'{head}namespace {name} {{\n#line {line} "{page}"\n{body}}}  // namespace {name}\n'


def main_of(names):
    """The main function of all: it runs the program that its argument names."""
    lines = ["#include <cstring>"] + [f"namespace {name} {{ int program(); }}" for name in names]
    lines += ["int main(int count, char** arguments) {"]
    lines += [f'  if (count == 2 && std::strcmp(arguments[1], "{name}") == 0) return {name}::program();' for name in names]
    return "\n".join([*lines, "  return 2;", "}", ""])


def main():
    root, output = Path(sys.argv[1]), Path(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    written = {}
    together = []
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        programs = [found for found in BLOCK.finditer(text) if "int main(" in found[1]]
        for number, found in enumerate(programs, 1):
            program, line = found[1], text.count("\n", 0, found.start(1)) + 1
            folders = page.relative_to(root).parts[1:-1]
            name = "_".join([*folders, page.stem]).lower().replace("-", "_") + f"_{number}"
            if name in written:
                sys.exit(f"{page}: another page has a program {name}")
            written[name] = program
            if undeclared(root, program):
                sys.exit(f"{page}:{line}: no header of this program has {undeclared(root, program)}")
            if "torch/torch.h" in INCLUDE.findall(program) and "int main()" in program:
                together.append(name)
                written[name] = as_function(name, program, line, page)
    written["snippets"] = main_of(together)
    for name, program in written.items():
        path = output / f"{name}.cpp"
        if not path.exists() or path.read_text(encoding="utf-8") != program:
            path.write_text(program, encoding="utf-8")
    print(";".join(together))
    print(";".join(name for name in written if name not in together and name != "snippets"), end="")


if __name__ == "__main__":
    main()
