"""Turns the house's headers and pages into what Doxygen reads; used by reference.py.

Headers have plain // comments. A block right above a declaration, or words behind a field, become its ///. The paragraph that
opens a file documents the file, and the class of the file's name where that has no comment of its own. Overloads share a
comment; another function below one, without a blank line between, refers to it. TORCH_ARG becomes a setter and a getter with
the words of header_options.py, TORCH_MODULE a holder. Every line remembers the line of the source that it comes from, so that
warnings can name it.

Pages of Markdown get labels for their headings, as GitHub makes them, and links that Doxygen follows.
"""
import os
import re
from pathlib import Path

SCOPE = re.compile(r"^(?:template <.*> )?(namespace|class|struct|union|enum class|enum)\b(?: alignas\(\d+\))?(?: \[\[.*?\]\])?"
                   r" ?([\w:]*)[^;()]*\{$")
LABEL = re.compile(r"^ *(public|protected|private):$")
# Members that say the same everywhere: what they match, and their words.
LIFE = (
    (re.compile(r"~\w+\("), "Releases what the object holds."),
    (re.compile(r"\boperator=\(\w+&&"), "Moves."),
    (re.compile(r"\boperator=\("), "Copies."),
    (re.compile(r"^(\w+)\(\1&&"), "Moves."),
    (re.compile(r"^(\w+)\(const \1&"), "Copies."),
)
USUAL = (
    (re.compile(r"\bserialize\("), "Part of the interface of torch::optim's options."),
    (re.compile(r"\b[gs]et_lr\("), "The learning rate, as torch::optim's schedulers see it."),
    (re.compile(r"\boperator[!=]=\("), "Compares every field."),
    (re.compile(r" override(?: =.*| \{.*)?;?$"), "Part of the interface of the base class, which explains it."),
)


def quoted(code):
    """Code between backticks, which Doxygen lets end at a ' unless they are doubled."""
    return f"`{code}`" if "'" in code and code[:1] == "`" else code


def escaped(words):
    """Words in which Doxygen sees neither commands, nor HTML, nor Markdown; code between backticks stays."""
    def part(found):
        if found[0][0] == "`":
            return quoted(found[0]) if found[0] != "`" else r"\`"
        # Markdown means nothing between quotes, so that * stays there.
        return re.sub(r"[\\@#%<>&]" if found[0][0] == '"' else r"[\\@#%<>&*]", r"\\\g<0>", found[0])

    return re.sub(r"""`[^`]*`|"[^"]*"|[^`"]+|.""", part, words)


def is_example(lines, i):
    return i < len(lines) and lines[i].startswith("  ")


def doc(comment):
    """The lines of a // comment as text for Doxygen; lines that are indented are an example."""
    lines = [re.sub(r"^\s*// ?", "", line).rstrip() for line in comment]
    out, i = [], 0
    while i < len(lines):
        first = i
        while is_example(lines, i) or (i > first and is_example(lines, i + 1) and not lines[i]):
            i += 1
        if i > first:
            is_cpp = any(re.search(r"[;{}](?: *//.*)?$", line) for line in lines[first:i])
            out += [r"\code{.cpp}" if is_cpp else r"\code{.unparsed}", *(line[2:] for line in lines[first:i]), r"\endcode"]
            continue
        if not lines[i].startswith(("NOLINT", "clang-format ")):
            out.append(re.sub(r"^([-+] |\d+\.(?= ))", r"\\\1", escaped(lines[i])))
        i += 1
    return out


def code_of(line):
    """A line without its comment, strings and characters."""
    return re.sub(r'"(?:\\.|[^"\\])*"|\'\\?.\'|/\*.*?\*/', '""', line).partition("//")[0].rstrip()


def function_of(text):
    """The name of the function that a declaration declares; empty for other members."""
    while "<" in text and (shorter := re.sub(r"<[^<>]*>", "", text)) != text:
        text = shorter
    found = re.match(r"[^=({]*?(operator[^\s(]+|~?\w+)\(", text.removeprefix("template "))
    return found[1] if found and not text.startswith("using ") else ""


class Scope:
    def __init__(self, kind, name):
        self.kind, self.name = kind, name
        self.is_private = kind == "class"


class Header:
    """One header, rewritten: `lines` for Doxygen and, for each of them, its `sources` line, from 1."""

    def __init__(self, name, text, tree):
        self.name, self.tree, self.source = name, tree, text.split("\n")
        self.lines, self.sources, self.scopes = [], [], []
        self.shared, self.first = [], ""  # the comment that members below share, and the function that it stands above
        self.opening = []
        self.read()

    def put(self, line, at):
        self.lines.append(line)
        self.sources.append(at + 1)

    def put_doc(self, words, at, indent=""):
        for line in words:
            self.put(f"{indent}/// {line}".rstrip(), at)

    def block_at(self, i):
        while i < len(self.source) and self.source[i].strip().startswith("//"):
            i += 1
        return i

    def read(self):
        end = self.block_at(0)
        self.opening = doc(self.source[:end])
        self.put_doc([r"\file", *self.opening], 0)
        i, above = end, []
        while i < len(self.source):
            line = self.source[i]
            if not line.strip():
                self.shared, above = [], []
            elif line.strip().startswith("//"):
                end = self.block_at(i)
                above, self.shared = self.source[i:end], []
                if above[0].strip().startswith("// ----"):
                    above = []
                i = end
                continue
            elif line.startswith("#"):
                if line.startswith("#define "):
                    self.put_doc(doc(above), i)
                i, above = self.put_directive(i), []
                continue
            else:
                i = self.read_statement(i, above)
                above = []
                continue
            self.put("", i)
            i += 1

    def put_directive(self, i):
        self.put(self.source[i] if self.source[i] != "#pragma once" else "", i)
        while self.source[i].endswith("\\"):
            i += 1
            self.put(self.source[i], i)
        return i + 1

    def read_statement(self, i, above):
        """Reads what begins in line i: the begin or end of a scope, a label, or a whole member."""
        line = code_of(self.source[i])
        if line.strip() in ("}", "};"):
            self.scopes.pop()
            self.put(line, i)
            return i + 1
        if found := LABEL.match(line):
            self.scopes[-1].is_private, self.shared = found[1] == "private", []
            self.put(line, i)
            return i + 1
        is_enum = bool(self.scopes) and self.scopes[-1].kind.startswith("enum")
        last, text, depth = i, "", 0
        while True:
            code = code_of(self.source[last])
            text = f"{text} {code.strip()}".strip()
            if depth == 0 and (found := SCOPE.match(text)):
                self.begin_scope(found, i, last, above)
                return last + 1
            depth += sum(code.count(c) for c in "({") - sum(code.count(c) for c in ")}")
            is_macro = re.fullmatch(r"[A-Z_]{5,}\(.*\)", text)
            if depth == 0 and (is_macro or is_enum or text.endswith((";", "}"))):
                break
            last += 1
        behind = self.source[last][len(self.source[last].partition("//")[0]):] if "//" in self.source[last] else ""
        end = last + 1
        if behind:
            column = self.source[last].index("//")
            while re.match(rf" {{{max(column - 2, 4)},}}//", self.source[end]):
                end += 1
        self.put_member(i, last, text, above, [behind, *self.source[last + 1:end]] if behind else [])
        return end

    def begin_scope(self, found, i, last, above):
        kind, name = found[1], found[2]
        words = doc(above)
        if not words and kind in ("class", "struct"):
            part = self.tree.parts.get(name)
            stem = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Impl")).lower()
            if stem == Path(self.name).stem.replace("onebit", "one_bit"):
                words = self.opening
            elif part and (purpose := self.tree.purpose(part)):
                words = [escaped(purpose)]
        if kind != "namespace":
            self.put_doc(words, i)
        for at in range(i, last + 1):
            self.put(code_of(self.source[at]), at)
        self.scopes.append(Scope(kind, name))
        self.shared = []

    def put_member(self, i, last, text, above, behind):
        if "= delete" in text or text.startswith(("FORWARD_HAS_DEFAULT_ARGS", "static_assert", "friend ")):
            return
        indent = re.match(r" *", self.source[i])[0]
        owner = self.scopes[-1].name if self.scopes else ""
        if found := re.match(r"(?:TORCH_ARG|PACER_OPTION|PACER_OPTION_OF)\((.+), (\w+)\)", text):
            self.put_option(owner, found[1], found[2], i, above, behind)
            return
        if found := re.match(r"TORCH_MODULE\((\w+)\)", text):
            words = [f"The holder of {found[1]}Impl, a shared handle; operator-\\> reaches its members."]
            self.put_doc(doc(above) or words, i)
            self.put(f"class {found[1]} : public torch::nn::ModuleHolder<{found[1]}Impl> {{}};", i)
            return
        if not (self.scopes and self.scopes[-1].is_private):
            function = function_of(text)
            if above:
                self.shared, self.first = doc(above), function
            self.put_doc(doc(above) + doc(behind) or self.words_without_comment(owner, function, text), i, indent)
        for at in range(i, last + 1):
            line = self.source[at]
            self.put(line.removesuffix(behind[0]).rstrip() if behind and at == last else line, at)

    def words_without_comment(self, owner, function, text):
        """What is said of a member that has no comment right above it; nothing where there is nothing to say."""
        usual = [words for pattern, words in LIFE if pattern.search(text)]
        if not usual and function and self.shared:
            self.first = self.first or function  # the comment stands above an alias or constant that the function needs
            if function == self.first:
                return self.shared
        usual += [words for pattern, words in USUAL if pattern.search(text)]
        if not usual and owner and function == owner:
            if f"{owner}()" in text:
                usual = ["Makes one with all defaults."]
            elif owner in self.tree.parts:
                usual = ["Makes one with these values; the others have their defaults."]
            else:
                usual = ["Makes one of these arguments."]
        if not usual and function and self.shared:
            usual = [f"The header groups it with {self.first}(): see there."]
        return usual[:1]

    def put_option(self, owner, kind, name, i, above, behind):
        if above:
            self.shared = doc(above)
        words = doc(above) + doc(behind) if above or behind else self.shared
        part = self.tree.parts.get(owner) or self.tree.shared.get(owner)
        option = part.options().get(name) if part else None
        setter = "Own" if owner in self.tree.shared else owner
        if option:
            kind = option["type"]
            words = [escaped(self.tree.meaning(part, option))]
            default = self.tree.default(part, option)
            words += ["It has no default."] if default == "needed" else [f"Default: {escaped(default)}."] if default else []
        self.put(" public:", i)
        self.put_doc(words if any(words) else [f"Sets {name}."], i, "  ")
        self.put(f"  {setter}& {name}(const {kind}& value);", i)
        self.put_doc([f"Returns {name}."], i, "  ")
        self.put(f"  const {kind}& {name}() const;", i)
        self.put(" private:", i)


LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")

BOLD = re.compile(r"\*\*((?:`[^`]*`|[^`*])+)\*\*|`[^`]*`")  # Doxygen's own ** does not know code


def slug(title):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).replace(" ", "-")


def label(page, anchor=""):
    """Doxygen's name of a page, or of a heading on it; `page` is its path in the tree."""
    if page == "README.md":
        return f"readme-{anchor}" if anchor else "mainpage"
    name = page.removeprefix("docs/").removesuffix(".md").replace("/", "-")
    return f"page-{name}" + (f"-{anchor}" if anchor else "")


def page_text(name, text, known):
    """A page for Doxygen, line by line as it was. `known`: the paths of all pages and headers that the reference has."""

    def link(found):
        is_image, words, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target:
            return found[0]
        path = os.path.normpath(Path(name).parent / path) if path else name
        if is_image:
            return f"![{words}]({Path(path).name})"
        if path not in known:
            return words
        breaks, words = "\n" * words.count("\n"), words.replace("`", "").replace("\n", " ")  # Doxygen takes plain words
        return f"{breaks}[{words}](@ref {path if path.endswith('.h') else label(path, anchor)})"

    def prose(text):
        text = BOLD.sub(lambda found: f"<b>{found[1]}</b>" if found[1] else found[0], LINK.sub(link, text))
        parts = re.split(r"(`[^`]*`|\(@ref [^)]*\))", text)
        return "".join(quoted(part) if i % 2 else part.replace("@", "\\@") for i, part in enumerate(parts))

    out, block, used = [], [], {}
    is_code = False

    def flush():
        if block:
            out.extend(prose("\n".join(block)).split("\n"))
            block.clear()

    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        if fence or is_code:
            flush()
            out.append(line)
            is_code ^= fence
        elif found := re.match(r"(#+) (.*)", line):
            flush()
            anchor = slug(found[2])
            used[anchor] = used.get(anchor, -1) + 1
            anchor += f"-{used[anchor]}" if used[anchor] else ""
            name_of = label(name, anchor if len(found[1]) > 1 else "")
            out.append(f"{found[1]} {prose(found[2]).replace('`', '')} {{#{name_of}}}")
        else:
            block.append(line)
    flush()
    return "\n".join(out)
