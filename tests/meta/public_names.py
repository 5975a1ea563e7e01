#!/usr/bin/env python3
"""Lists every name that <pacer/pacer.h> shows to a program, so that a change of the public face is seen and meant.

public_names.py check [ROOT]   compares the tree with tests/meta/public_names.txt; prints the differences and exits with 1
public_names.py write [ROOT]   writes that file
public_names.py self-test      reads headers whose names are known

Names are those at the scope of a namespace: types, functions, constants, aliases and macros, with `kernels::`, `modules::` and so
on in front of what is not in `pacer` itself. Members of classes are not listed, nor is anything in `detail`.
"""
import re
import sys
import tempfile
from pathlib import Path

LIST = "tests/meta/public_names.txt"
HEAD = "# Every name that <pacer/pacer.h> shows, by header. Written by public_names.py; read the difference before you commit it.\n"


def without_comments(text):
    """The code alone; strings and characters become empty ones, so that no brace is taken from them."""
    pattern = r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'"""
    return re.sub(pattern, lambda m: " " if m[0][0] == "/" else m[0][0] * 2, text, flags=re.S)


def balanced(text, start, opening, closing):
    """Behind the bracket that closes the one at `start`; what stands in parentheses inside of it does not count."""
    depth = inside = 0
    for i in range(start, len(text)):
        inside += (text[i] == "(") - (text[i] == ")")
        depth += 0 if inside > 0 else (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i + 1
    return len(text)


def without_template(head):
    head = head.strip()
    while re.match(r"template\b", head):
        head = head[balanced(head, head.index("<"), "<", ">"):].strip()
    return head


def statements(text):
    """Yields ("open", head) and ("close", "") for namespaces, and ("is", head) for every declaration outside of classes and
    functions, whose bodies are left out."""
    i, head, depth = 0, "", 0
    while i < len(text):
        c = text[i]
        depth += (c in "([") - (c in ")]")
        if c == "{" and depth == 0:
            if re.match(r"\s*(inline\s+)?namespace\b", head):
                yield "open", head.strip()
                head = ""
            else:
                i = balanced(text, i, "{", "}") - 1
                rest = without_template(head)
                if not re.match(r"(?:class|struct|union|enum)\b(?!.*\()", rest, re.S) and "=" not in rest:
                    yield "is", head.strip()  # a function; what begins with a type goes on to its semicolon
                    head = ""
                else:
                    head += "{}"
        elif c == "}" and depth == 0:
            yield "close", ""
            head = ""
        elif c == ";" and depth == 0:
            if head.strip():
                yield "is", head.strip()
            head = ""
        else:
            head += c
        i += 1


def name_of(head):
    """The name that a declaration adds, or None."""
    head = without_template(head)
    head = re.sub(r"\[\[.*?\]\]|\b(?:alignas|__attribute__)\s*\(+[^()]*\)+", "", head).strip()
    if re.match(r"(?:using\s+namespace|friend|static_assert|extern\s+\"\"$)", head) or "operator" in head:
        return None
    if found := re.match(r"TORCH_MODULE(?:_IMPL)?\s*\(\s*(\w+)", head):
        return found[1]
    if found := re.match(r"using\s+(\w+)\s*=", head) or re.match(r"using\s+[\w:]*::(\w+)$", head):
        return found[1]
    if found := re.match(r"(?:class|struct|union|enum(?:\s+class|\s+struct)?)\s+(\w+)(?:\s+final)?\s*(?:$|\{\}|:[^:])", head):
        return found[1] if head.endswith("{}") else None  # a declaration ahead shows nothing new
    if found := re.match(r"(?:class|struct)\s+\w[\w:]*<", head):
        return None  # a specialization
    outside = head.split("=")[0] if "(" not in head.split("=")[0] else head
    if "(" in outside:
        found = re.search(r"([\w:]+)\s*\($", outside[: outside.index("(") + 1])
        name = found[1] if found else None
        return None if name is None or "::" in name or name.startswith("PACER_") else name
    found = re.search(r"(\w+)\s*(?:\[.*\])?\s*(?:\{\})?$", outside.strip(), re.S)
    return found[1] if found else None


def names_in(path):
    """The names that a header adds, in their order."""
    text = without_comments(path.read_text(encoding="utf-8")).replace("\\\n", " ")
    names = [found[1] for found in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(PACER_\w+)", text, re.M)]
    undone = set(re.findall(r"^[ \t]*#[ \t]*undef[ \t]+(\w+)", text, re.M))
    names = [name for name in dict.fromkeys(names) if name not in undone]
    text = re.sub(r"^[ \t]*#[^\n]*", "", text, flags=re.M)
    scopes = []
    for kind, head in statements(text):
        if kind == "open":
            scopes.append(re.sub(r"(?:inline\s+)?namespace\s*", "", head).strip())
        elif kind == "close":
            if scopes:
                scopes.pop()
        else:
            inside = [part for scope in scopes for part in (scope.split("::") if scope else ["detail"])]
            if "detail" in inside or inside[:1] != ["pacer"]:
                continue
            name = name_of(head)
            full = "::".join([*inside[1:], name]) if name else None
            if full and full not in names:
                names.append(full)
    return names


def reached(root, start="pacer.h"):
    """The headers that one brings, without itself, in the order of the alphabet."""
    found, todo = set(), [start]
    while todo:
        header = todo.pop()
        for name in re.findall(r"^\s*#\s*include\s*<pacer/([^>]+)>", (root / header).read_text(encoding="utf-8"), re.M):
            if name not in found and (root / name).exists():
                found.add(name)
                todo.append(name)
    return sorted(found)


def listing(root):
    lines = []
    for header in reached(root):
        if names := names_in(root / header):
            lines.append(f"{header}: {', '.join(sorted(names))}\n")
    count = sum(line.count(", ") + 1 for line in lines)
    return HEAD + "".join(lines) + f"# {count} names in {len(lines)} headers\n"


def check(root):
    wanted = (root / LIST).read_text(encoding="utf-8").splitlines() if (root / LIST).exists() else []
    found = listing(root).splitlines()

    def pairs(lines):
        return {(name, line.split(": ")[0]) for line in lines if not line.startswith("#") for name in line.split(": ")[1].split(", ")}
    gone, new = pairs(wanted) - pairs(found), pairs(found) - pairs(wanted)
    problems = [f"{header} no longer shows {name}" for name, header in sorted(gone)]
    problems += [f"{header} shows {name}" for name, header in sorted(new)]
    if problems or wanted != found:
        problems.append(f"{LIST} says otherwise; if the change of the public face is meant, write it with public_names.py write")
    return problems


def self_test():
    header = r'''
// class NotOne {};
#pragma once
#define PACER_LIMIT 3
namespace torch { class Tensor; }
namespace pacer {
namespace detail { struct Hidden {}; void hidden(); }
class Ahead;
enum class Kind : char { a, b };
inline constexpr int64_t kMost = int64_t{1} << 20, kOther = 3;
constexpr char kWord[] = "{";
struct Options { Options() = default; int f() { return 1; } };
class Base final : public Options { void g(); };
template <class T, class = std::enable_if_t<(sizeof(T) > 2)>>
class Many : public Base { };
template <> struct Many<int> {};
using Alias = std::vector<int>;
using torch::Tensor;
[[nodiscard]] std::map<std::string, int> read(const std::string& path = "{;", int n = (1 + 2));
template <class F = int>
inline void visit(const F& f) { if (f) { f(); } }
std::ostream& operator<<(std::ostream& out, const Base& base);
bool operator==(const Base& a, const Base& b);
class BlocksImpl : public torch::nn::Module { int x = 3; };
TORCH_MODULE(Blocks);
static_assert(sizeof(int) == 4, "");
void Base::g();
namespace nn { struct Linear {}; }
}  // namespace pacer
namespace pacer::kernels { float fma_(float a, float b); extern const int kTable[3]; }
namespace std { template <> struct tuple_size<pacer::Base> {}; }
'''
    wanted = ["PACER_LIMIT", "Kind", "kMost", "kWord", "Options", "Base", "Many", "Alias", "Tensor", "read", "visit", "BlocksImpl",
              "Blocks", "nn::Linear", "kernels::fma_", "kernels::kTable"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.h"
        path.write_text(header)
        found = names_in(path)
        problems = [f"it has {found} instead of {wanted}"] if found != wanted else []
        root = Path(folder)
        (root / "pacer.h").write_text("#include <pacer/some.h>\n")
        (root / "tests/meta").mkdir(parents=True)
        (root / LIST).write_text(listing(root))
        if check(root):
            problems.append(f"a list of its own does not fit: {check(root)}")
        path.write_text(header.replace("struct Options", "struct Choices"))
        said = check(root)
        if said[:2] != ["some.h no longer shows Options", "some.h shows Choices"]:
            problems.append(f"a renamed struct is told as {said}")
    return problems


def main():
    command, root = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    if command == "write":
        (root / LIST).write_text(listing(root), encoding="utf-8")
        return 0
    problems = check(root) if command == "check" else self_test()
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
