#!/usr/bin/env python3
"""Writes every complete C++ program of the README and the docs into a folder, so that the build compiles them.

extract.py ROOT OUTPUT    prints the files it wrote, separated by ';' (a CMake list)

A program is a ```cpp block with a main function; other blocks are fragments and are left to the reader.
"""
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```cpp\n(.*?)^```", re.M | re.S)


def main():
    root, output = Path(sys.argv[1]), Path(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        programs = [block for block in BLOCK.findall(page.read_text(encoding="utf-8")) if "int main(" in block]
        for number, program in enumerate(programs, 1):
            folders = page.relative_to(root).parts[1:-1]
            name = "_".join([*folders, page.stem]).lower().replace("-", "_")
            path = output / f"{name}_{number}.cpp"
            if str(path) in written:
                sys.exit(f"{page}: another page has a program {path.name}")
            if not path.exists() or path.read_text(encoding="utf-8") != program:
                path.write_text(program, encoding="utf-8")
            written.append(str(path))
    print(";".join(written), end="")


if __name__ == "__main__":
    main()
