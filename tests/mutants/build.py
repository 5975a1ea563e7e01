"""Builds one test program that holds all mutants: a copy of the mutated folders, the objects that their files
reach, and everything else as the build folder has it already."""

import hashlib
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import mutate

HERE = pathlib.Path(__file__).resolve().parent
ATTEMPTS = 8
PROGRAMS = ("unit", "property")


class Tree:
    """A copy of the library's folders, and the mutants in it by file."""

    def __init__(self, root, work, folders):
        self.root, self.copy = root, work / "tree"
        self.include = work / "include"
        self.unusable_file = work / "not_compiled.json"
        self.unusable = set(json.loads(self.unusable_file.read_text())) if self.unusable_file.exists() else set()
        self.mutants = {}
        self.written = {}
        self.lock = threading.Lock()
        (self.include / "pacer").mkdir(parents=True, exist_ok=True)
        for folder in folders:
            shutil.copytree(root / folder, self.copy / folder, dirs_exist_ok=True, copy_function=self._copy_if_new)
            self._link(self.include / "pacer" / folder, self.copy / folder)
        self._link(self.include / "pacer" / "pacer.h", root / "pacer.h")

    @staticmethod
    def _copy_if_new(source, target):
        # A file with mutants keeps its time, so that nothing is compiled again; write() exchanges it.
        if not pathlib.Path(target).exists():
            shutil.copy2(source, target)

    @staticmethod
    def _link(link, target):
        if link.is_symlink():
            link.unlink()
        link.symlink_to(target)

    def put(self, mutants):
        for mutant in mutants:
            self.mutants.setdefault(mutant.file, []).append(mutant)
        for path in self.copy.rglob("*"):
            file = str(path.relative_to(self.copy))
            if path.is_file() and (file in self.mutants or path.read_bytes() != (self.root / file).read_bytes()):
                self.write(file)

    def write(self, file):
        text = (self.root / file).read_text()
        usable = [m for m in self.mutants.get(file, []) if m.key not in self.unusable]
        written, left_out = mutate.schemata(text, usable)
        self._give_up(left_out)
        self.written[file] = written
        target = self.copy / file
        if target.read_text() != written:
            target.write_text(written)

    def _give_up(self, mutants):
        self.unusable |= {m.key for m in mutants}
        self.unusable_file.write_text(json.dumps(sorted(self.unusable), indent=0))

    def drop_from(self, messages):
        """Takes out what the compiler complains of. False where that is not a mutant."""
        with self.lock:
            folders = "|".join(re.escape(str(folder)) for folder in (self.copy, self.include / "pacer"))
            places = re.findall(rf"^(?:{folders})/([^:]+):(\d+):(?:\d+:)? (?:fatal )?error", messages, re.M)
            files = set()
            for file, line in places:
                number = mutate.numbers_at(self.written.get(file, ""), int(line))
                usable = [m for m in self.mutants.get(file, []) if m.key not in self.unusable]
                # Where none is at fault by its line, one of them has broken the text further up.
                found = [m for m in usable if m.number == number] or usable
                self._give_up(found)
                files |= {file} if found else set()
            for file in files:
                self.write(file)
            return bool(files)


class Build:
    def __init__(self, build, work, tree, jobs):
        self.build, self.work, self.tree, self.jobs = build, work, tree, jobs
        self.commands = json.loads((build / "compile_commands.json").read_text())
        self.program = work / "tests"

    def run(self):
        objects = [c for c in self.commands if self._is_library(c) and self._mutated_files(c)]
        own = re.compile(r"include <pacer/(kernels/math/[\w/]+\.h|core/[\w/]+\.h|files/[\w/]+\.h)>")
        for command in self._tests():
            # A test that calls an inline function has its own copy of it.
            used = {file for source in self._sources(command) for file in own.findall(source.read_text())}
            if used & self.tree.mutants.keys():
                objects.append(command)
        pool = ThreadPoolExecutor(self.jobs)
        try:
            made = dict(zip([self._output(c) for c in objects], pool.map(self._compile, objects)))
        finally:
            pool.shutdown(cancel_futures=True)
        return self._link(made)

    def _tests(self):
        return [c for c in self.commands if re.search(rf"/pacer-({'|'.join(PROGRAMS)})-tests\.dir/", self._output(c))]

    @staticmethod
    def _output(command):
        return re.search(r" -o (\S+)", command["command"])[1]

    def _is_library(self, command):
        file, folder = command["file"], self._output(command).split("/")[0]
        return file.endswith((".cxx", ".cpp")) and (self.tree.copy / folder).exists() and "_cuda" not in file

    def _sources(self, command):
        """The files behind an object: those that a unity file includes, or the one."""
        file = pathlib.Path(command["file"])
        if "/Unity/" not in command["file"]:
            return [file]
        return [pathlib.Path(name) for name in re.findall(r'#include "([^"]+)"', file.read_text())]

    def _reached(self, sources):
        """All files of the library that these include, by their names in it."""
        seen, waiting = set(), list(sources)
        while waiting:
            path = waiting.pop()
            for name in re.findall(r"#include <pacer/([\w/.]+)>", path.read_text()):
                if name not in seen and (self.tree.root / name).exists():
                    seen.add(name)
                    waiting.append(self.tree.root / name)
        for path in sources:
            if path.is_relative_to(self.tree.root):
                seen.add(str(path.relative_to(self.tree.root)))
        return seen

    def _mutated_files(self, command):
        """Those that the object is made of, and the headers that these name."""
        files = set()
        for path in self._sources(command):
            files |= {str(path.relative_to(self.tree.root)), *re.findall(r"#include <pacer/([\w/.]+)>", path.read_text())}
        return files & self.tree.mutants.keys()

    def _shadow(self, path):
        copy = self.tree.copy / path.relative_to(self.tree.root)
        return copy if copy.exists() else path

    def _compile(self, command):
        sources = self._sources(command)
        output = self.work / "objects" / self._output(command)
        output.parent.mkdir(parents=True, exist_ok=True)
        unit = output.with_suffix(".cpp")
        text = "".join(f'#include "{self._shadow(s)}"\n' for s in sources)
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        arguments = [
            a
            for a in shlex.split(command["command"].replace(f"{self.build}/include", str(self.tree.include)))
            if a != "-Werror" and not re.fullmatch(r"-O\d|-W[\w-]+|-Wno.*", a)
        ]
        if arguments[0].endswith("ccache"):
            arguments = arguments[1:]
        arguments[arguments.index("-o") + 1] = str(output)
        arguments[arguments.index("-c") + 1] = str(unit)
        # Loops over elements are optimized; the rest, with LibTorch's headers, takes less to compile than to run.
        optimization = "-O1" if self._output(command).startswith(("core", "files", "kernels")) else "-O0"
        arguments += [optimization, "-w", "-fno-diagnostics-show-caret", "-include", str(HERE / "switch.h")]
        for _ in range(ATTEMPTS):
            key = self._key(arguments, sources)
            key_file = output.with_suffix(".key")
            if output.exists() and key_file.exists() and key_file.read_text() == key:
                return output
            result = subprocess.run(arguments, cwd=self.build, capture_output=True, text=True)
            print(f"compiled {self._output(command)}: {'ok' if result.returncode == 0 else 'again'}", flush=True)
            if result.returncode == 0:
                key_file.write_text(key)
                return output
            # Another compiler may have found the same mutants, and taken them out of a header, in the meantime.
            if not self.tree.drop_from(result.stderr) and self._key(arguments, sources) == key:
                break
        raise SystemExit(f"{unit} does not compile:\n{result.stderr[-3000:]}")

    def _key(self, arguments, sources):
        hashed = hashlib.sha256(repr(arguments).encode())
        for name in sorted(self._reached(sources)):
            path = self._shadow(self.tree.root / name)
            hashed.update(path.read_bytes())
        for path in sources:
            hashed.update(self._shadow(path).read_bytes())
        return hashed.hexdigest()

    def _link(self, made):
        driver = self.work / "driver.o"
        source = HERE / "driver.cpp"
        if not driver.exists() or driver.stat().st_mtime < source.stat().st_mtime:
            switch = ["-include", str(HERE / "switch.h")]
            subprocess.run(["c++", "-std=c++17", "-c", str(source), *switch, "-o", str(driver)], check=True)
        asked = ["ninja", "-C", str(self.build), "-t", "commands", "pacer-unit-tests"]
        line = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        words = shlex.split(re.sub(r"^: && | && :$", "", line))
        kept = [w for w in words[1:] if not w.endswith(".o") and not re.search(r"libCatch2(With)?Main", w)]
        kept[kept.index("-o") + 1] = str(self.program)
        tests = [made.get(self._output(c)) or self.build / self._output(c) for c in self._tests()]
        library = [path for name, path in made.items() if "-tests.dir" not in name]
        newest = max(path.stat().st_mtime for path in [*tests, *library, driver])
        if not self.program.exists() or self.program.stat().st_mtime < newest:
            # The mutated objects come first: theirs are then the inline functions that are not inlined.
            objects = [str(path) for path in [driver, *library, *tests]]
            subprocess.run([words[0], *objects, *kept], cwd=self.build, check=True)
        return self.program
