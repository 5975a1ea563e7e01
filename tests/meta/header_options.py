"""What the public headers say of options: structs and classes with setters, enumerations, hooks, and who takes which.

What is read is the house's way to write headers, not C++: structs and classes begin in column 0, members behind two spaces. A
comment holds for all members below it, up to a blank line, another comment or anything that is no option; a comment between
"----" for all members up to the next one of its kind that have none of their own. "As in OTHER" and "See OTHER" take OTHER's
words. A struct has the options of its bases that are templates of `Own`, with the defaults that its constructor sets.
"""
import re
from pathlib import Path

PLAIN = {"LossScaleRule", "PipelineSchedule", "PipelineCosts"}  # structs whose fields users set without setters
ALSO = PLAIN | {"LengthSchedule"}  # has setters, but another name than ...Options
STATE = {"FusedAdamStateFields"}  # has TORCH_ARG for LibTorch's sake and is nothing to choose
BASES = {"ParallelTraining", "GradientExchange"}  # hooks that others derive from
PARTS = {"EpochSampler", "LayerDropImpl", "LengthBuckets", "Pipeline"}  # no hooks by their class, and listed among them
# Members whose comment above is about the member before them alone.
ALONE = {"LayerNormMlpOptions.eps", "LayerNormMlpOptions.residual", "TrainingMemoryOptions.unit_bytes"}


def said(lines):
    """The words of comment lines, in one line."""
    words = (re.sub(r"^\s*//\s?", "", line).strip() for line in lines)
    return " ".join(word for word in words if word and not word.startswith("NOLINT"))


def above(lines, index):
    """The comment that ends right above a line."""
    first = index
    while first > 0 and lines[first - 1].startswith("//"):
        first -= 1
    return said(lines[first:index])


def opening(lines):
    """The first sentence of a header's opening paragraph."""
    last = next((i for i, line in enumerate(lines) if not line.startswith("//") or line.strip() == "//"), 0)
    return re.split(r"(?<=\.) (?=[A-Z0-9])", said(lines[:last]))[0].rstrip(".,:") + "."


def members(body):
    """Splits the lines of a class into ("comment", words), ("section", words), ("break", label) and ("member", text,
    words behind)."""
    found, i = [], 0
    while i < len(body):
        line = body[i]
        if not line.strip() or re.match(r"^ ?\w+:$", line.rstrip()):
            found.append(("break", line.strip()))
            i += 1
        elif line.strip().startswith("//"):
            first = i
            while i < len(body) and body[i].strip().startswith("//"):
                i += 1
            words = said(body[first:i])
            if line.index("//") > 2 and found and found[-1][0] == "member":  # goes on behind a member
                found[-1] = ("member", found[-1][1], f"{found[-1][2]} {words}".strip())
            elif words.startswith("----"):
                found.append(("section", words.strip("- ")))
            else:
                found.append(("comment", words))
        else:
            text, behind, depth = "", "", 0
            while i < len(body):
                code, _, behind = body[i].partition("//") if "://" not in body[i] else (body[i], "", "")
                text += " " + code.strip()
                depth += sum(code.count(c) for c in "({") - sum(code.count(c) for c in ")}")
                i += 1
                if depth == 0 and re.search(r"[;}],?$|,$", text.strip()):
                    break
            found.append(("member", " ".join(text.split()), behind.strip()))
    return found


class Part:
    """An options struct, or a class with setters, as its header declares it."""

    def __init__(self, name, header, namespace, comment, body):
        self.name, self.header, self.namespace, self.comment = name, header, namespace, comment
        self.constructors = []  # (declaration, words, fields it sets)
        self.set = {}  # option -> the value that a constructor gives it through its setter
        self.sections = [("", [])]  # (words, options)
        self.aliases = dict(re.findall(r"using (\w+) = ([^;]+);", " ".join(body)))
        self.fields = {}  # of a class with setters: private field without its underscore -> default, or its type
        self.alone = []
        self.read(members(body))

    def options(self):
        return {option["name"]: option for _, options in self.sections for option in options}

    def read(self, found):
        words, is_first, is_public = "", False, True
        for item in found:
            if item[0] == "section":
                self.sections.append((item[1], []))
            if item[0] != "member":
                words, is_first = (item[1], True) if item[0] == "comment" else ("", False)
                if item[0] == "break" and item[1]:
                    is_public = item[1] == "public:"
                continue
            option = self.option_of(item[1]) if is_public else None
            if option is None:
                self.read_other(item[1], words, is_public)
                words = ""
            elif option["name"] not in self.options():  # else an overload
                alone = f"{self.name}.{option['name']}" in ALONE and not is_first and words
                self.alone += [f"{self.name}.{option['name']}"] if alone else []
                option["meaning"] = item[2] or ("" if alone else words)
                self.sections[-1][1].append(option)
            is_first = False

    def read_other(self, text, words, is_public):
        if found := re.match(rf"(?:explicit )?{self.name}\((.*?)\)(?=\s*(?::|\{{|;| =))", text):
            if found[1] and is_public and "= delete" not in text and "&&" not in found[1]:
                sets = dict(re.findall(r"(\w+)_\(((?:[^()]|\([^()]*\))*)\)", text[found.end():]))
                self.constructors.append((f"{self.name}({found[1]})", words, sets))
                defaults = dict(re.findall(r" (\w+) = ([^,]+)", found[1]))  # of the constructor's arguments
                self.set.update((name, defaults.get(value, value)) for name, value in
                                re.findall(r"\b(\w+)\(([^()\s]+)\)[.;]", text[found.end():]))
        elif found := re.match(rf"static {self.name} (\w+\(.*?\));", text):
            self.constructors.append((f"{self.name}::{found[1]}", words, {}))
        elif found := re.match(r"(?:const )?([\w:<>, ]+?) (\w+_\b.*);$", text):
            for name, value in re.findall(r"(\w+)_(?: = ([^,;]+))?(?:,|$)", found[2]):
                self.fields[name] = value or self.aliases.get(found[1], found[1])

    def option_of(self, text):
        if found := re.match(r"(?:TORCH_ARG|PACER_OPTION)\((.+), (\w+)\)(?: = (.+))?;$", text):
            return {"type": found[1], "name": found[2], "default": found[3], "argument": True}
        if found := re.match(r"PACER_OPTION_OF\(\w+, (\w+)_, (\w+)\);$", text):
            return {"type": "", "name": found[2], "default": None, "argument": True, "of": self.fields[found[1]]}
        if found := re.match(rf"(?:{self.name}|Own)& ([a-z]\w*)\(([^()]*)\)", text):
            parameter = re.match(r"(.+?) (\w+)(?: = .+)?$", found[2])
            return {"type": parameter[1] if parameter else "", "name": found[1], "default": None}
        if self.name in PLAIN and (found := re.match(r"([\w:<>]+) (\w+) = ([^()]+);$", text)):
            return {"type": found[1], "name": found[2], "default": found[3]}
        return None


class Tree:
    """All that the public headers say, by name."""

    def __init__(self, headers):
        self.parts, self.enums, self.hooks, self.openings, self.users = {}, {}, {}, {}, {}
        self.shared = {}  # templates of `Own`, whose options are those of the structs that derive from them
        texts = {name: text.split("\n") for name, text in headers}
        for name, lines in texts.items():
            self.openings[name] = opening(lines)
            self.read(name, lines)
        self.unread = {}  # how many TORCH_ARG and PACER_OPTION of a header are in no part
        for name, text in headers:
            read = [option for part in [*self.parts.values(), *self.shared.values()] if part.header == name
                    for option in part.options().values()]
            left = len(re.findall(r"^ +(?:TORCH_ARG|PACER_OPTION(?:_OF)?)\(", text, re.M)) - sum("argument" in one for one in read)
            if left and not any(f"class {state} " in text for state in STATE):
                self.unread[name] = left
        for part in [*self.shared.values(), *self.parts.values()]:
            self.take_types(part)
        for part in self.parts.values():
            self.inherit(part)
        for name, lines in texts.items():
            self.find_users(lines)

    def take_types(self, part):
        """What PACER_OPTION_OF leaves to the struct that it names."""
        for option in part.options().values():
            if option.get("of") in self.parts:
                lower = self.parts[option["of"]].options()[option["name"]]
                option.update(type=lower["type"], default=option["default"] or lower["default"])
                option["meaning"] = option["meaning"] or f"See {option['of']}."

    def inherit(self, part):
        """The options of its bases, before its own; sections of the same words are one."""
        sections = {}
        for base in self.bases_of(part):
            part.fields = {**base.fields, **part.fields}
            part.aliases = {**base.aliases, **part.aliases}
            for words, options in base.sections:
                sections.setdefault(words, []).extend({**option, "default": part.set.get(option["name"], option["default"])}
                                                      for option in options)
        for words, options in part.sections:
            sections.setdefault(words, []).extend(options)
        part.sections = list(sections.items())

    def bases_of(self, part):
        """Those above a base stand before it."""
        return [above for name in part.bases if name in self.shared
                for above in [*self.bases_of(self.shared[name]), self.shared[name]]]

    def read(self, header, lines):
        namespace = "pacer"
        for i, line in enumerate(lines):
            if found := re.match(r"namespace (pacer[\w:]*) \{", line):
                namespace = found[1]
            if found := re.match(r"enum class (\w+).*?\{(.*)", line):
                end = next(j for j in range(i, len(lines)) if "};" in lines[j])
                inner = lines[i + 1:end] if end > i else [f"  {found[2].split('}')[0].strip()},"]
                self.enums[found[1]] = (above(lines, i), enumerators(inner))
            head, last = line, i  # bases may stand in lines of their own
            while re.match(r"(?:struct|class) .*[:,]", head) and head.endswith(",") and last + 1 < len(lines):
                last += 1
                head += " " + lines[last].strip()
            if found := re.match(r"(?:struct|class) (?:\[\[\w+\]\] )?(\w+)(?: final)?( : [^{;]+)? \{$", head):
                end = next(j for j in range(i, len(lines)) if lines[j].startswith("};"))
                body = lines[last + 1:end]
                part = Part(found[1], header, namespace, above(lines, i), body)
                part.bases = re.findall(r"public (\w+)<", found[2] or "")
                if i > 0 and re.match(r"template <class Own\b", lines[i - 1]):
                    self.shared[part.name] = part
                else:
                    self.add(part, found[2] or "", "\n".join(body))

    def add(self, part, bases, body):
        setters = "TORCH_ARG(" in body or (part.name.endswith("Options") and (part.options() or part.bases))
        if (setters or part.name in ALSO) and part.name not in STATE:
            self.parts[part.name] = part
        elif part.name in PARTS or (re.search(r"public (Hook|ParallelTraining|GradientExchange)\b", bases) and part.name not in BASES):
            self.hooks[part.name] = part

    def find_users(self, lines):
        """Functions and constructors that take options."""
        owner, is_public = "", True
        for i, line in enumerate(lines):
            if found := re.match(r"(?:struct|class) (?:\[\[\w+\]\] )?(\w+).*\{$", line):
                owner, is_public = found[1], True
                if (made_of := re.search(r": public \w+<(\w+)> \{$", line)) and made_of[1] in self.parts:
                    self.users.setdefault(made_of[1], []).append(owner)
            elif line.startswith("};"):
                owner, is_public = "", True
            elif found := re.match(r" (\w+):$", line):
                is_public = found[1] == "public"
            if not is_public or line.startswith("   ") or re.match(r" *(//|#|using|TORCH_ARG|PACER_OPTION)", line):
                continue
            text, j = line, i
            while text.count("(") > text.count(")") and j + 1 < len(lines):
                j += 1
                text += " " + lines[j].strip()
            if not (found := re.match(r" *(?:[\w:<>,&* \[\]]+ )?[*&]?(\w+)\((.*)", text)):
                continue
            arguments = re.split(r"\) ?(?:const\b|override|noexcept|[:{;])", found[2])[0]
            user = (found[1] if found[1] == owner or not owner else f"{owner}::{found[1]}").replace("Impl", "")
            for name in set(re.findall(r"\b(\w+)\b(?=[&>]* \w)", arguments)) & set(self.parts) - {owner}:
                self.users.setdefault(name, []).append(user)

    # ---- what is said of an option ----

    def meaning(self, part, option):
        """Its words; empty where no header has any."""
        own = option["meaning"]
        if found := AS_IN.search(own):
            own = self.words_of(found[1], option["name"])
            own = f"{own} {found[2][:1].upper()}{found[2][1:]}".strip() if own else ""
        section = next(words for words, options in part.sections if option in options)
        if not own and (found := AS_IN.search(section)):
            own = self.words_of(found[1], option["name"])
        if own and not re.fullmatch(r"\S+ unless set\.", own):
            first = own.split(" ")[0]
            values = [value for value, _ in self.enums.get(bare(option["type"]), ("", []))[1]]
            return own.replace(first, f"`{first}`", 1) if first in values else sentence(own)
        for _, words, sets in part.constructors:
            if words and option["name"] in sets:
                return words
        return self.enums.get(bare(option["type"]), ("", []))[0]

    def words_of(self, other, name):
        part = self.parts.get(other)
        return self.meaning(part, part.options()[name]) if part and name in part.options() else ""

    def default(self, part, option):
        if option["default"]:
            return self.value(option["default"])
        kind = part.aliases.get(option["type"], option["type"])
        if option.get("argument") and not kind.startswith("std::optional"):
            for declaration, _, sets in part.constructors:
                if given := re.sub(r"^std::move\((\w+)\)$", r"\1", sets.get(option["name"], "")):
                    return "needed" if re.search(rf" {re.escape(given)}(,|\)$)", declaration) else f"`{given}`"
            return "empty" if re.match(r"std::(vector|string)", kind) else "unset"
        value = part.fields.get(option["name"], "")
        if value and not value.startswith("std::"):
            return self.value(value)
        words = option["meaning"]
        if found := re.search(r"(\S+) unless set\b(?! otherwise)|(\S+), the default", words):
            return self.value(found[1] or found[2])
        if (found := AS_IN.search(words)) and found[1] in self.parts:
            other = self.parts[found[1]]
            return self.default(other, other.options()[option["name"]])
        if re.search(r"; needed\.$", words):
            return "needed"
        if re.match(r"std::(vector|string)", value):
            return "empty"
        return "unset" if value or option.get("argument") else ""

    def value(self, text):
        text = text.strip()
        if found := re.match(r"(\w+)\(\)\.(\w+)\(\)$", text):
            other = self.parts[found[1]]
            return self.default(other, other.options()[found[2]])
        if found := re.match(r"(?:int64_t\{(\d+)\}|(\d+)) << ([123]0)$", text):
            return f"{found[1] or found[2]} {dict(zip(('10', '20', '30'), ('KiB', 'MiB', 'GiB')))[found[3]]}"
        if found := re.match(r"std::chrono::(\w+)\((\d+)\)$", text):
            return f"{found[2]} {found[1]}"
        if found := re.match(r"std::make_tuple\((.+)\)$", text):
            text = f"{{{found[1]}}}"
        return f"`{text.replace('kernels::', '')}`"

    def type(self, part, text):
        """A type as users think of it."""
        text = re.sub(r"^const |&+$", "", text.strip()).strip()
        text = part.aliases.get(text.split("::")[-1], text) if not text.startswith("std::") else text
        if text.startswith("LengthSchedule::"):
            return self.type(self.parts["LengthSchedule"], text.split("::")[1])
        if found := re.match(r"std::optional<(.+)>$", text):
            return f"{self.type(part, found[1])}, or unset"
        if found := re.match(r"std::vector<(.+)>$", text):
            return f"list of {self.type(part, found[1])}"
        if found := re.match(r"std::(?:tuple|pair)<(.+)>$", text):
            return f"`{{{found[1]}}}`"
        if found := re.match(r"std::function<(.+)>$", text):
            return f"function `{found[1]}`"
        name = text.split("::")[-1]
        if name in self.enums or name in self.parts:
            return f"[`{name}`](#{name.lower()})"
        known = {"std::string": "string", "std::chrono::milliseconds": "duration", "at::ScalarType": "dtype", "": "no argument"}
        return known.get(text, f"`{text}`")

    def purpose(self, part):
        """What it is for: its own comment, or the first sentence of the header of what takes it."""
        if part.comment and not part.comment.startswith("Setters "):
            return part.comment
        users = self.users.get(part.name, [])
        names = {snake(part.name.replace("Options", ""))} | {snake(user) for user in users if "::" not in user}
        if any(Path(part.header).stem.startswith(name) for name in names):
            return f"{self.openings[part.header]} {part.comment}".strip()
        return f"Options of {listed(users[:1])}."


AS_IN = re.compile(r"(?:^|: )(?:(?:[Ee]ach )?[Aa]s in (?=\w)|See (?=[A-Z]))(\w+)(?:::\w+)?[;,.]? ?(.*)$")


def enumerators(lines):
    """(name, words) of each. A comment above holds for the next one; one behind goes on in the lines below it."""
    found, words = [], ""
    for item in members(lines):
        if item[0] == "comment":
            words = item[1]
        elif item[0] == "member":
            names = [name.split("=")[0].strip() for name in item[1].split(",") if name.strip()]
            found += [(name, item[2] or words) for name in names]
            words = ""
    return found


def bare(kind):
    """The name of a type without std::optional and namespaces."""
    return re.sub(r"^std::optional<(.+)>$", r"\1", kind).split("::")[-1]


def snake(name):
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.split("::")[0]).lower()


def sentence(words):
    """The words with a full stop, and a capital letter where they begin with a word of prose."""
    words = words if words.endswith(".") else f"{words}."
    return words[:1].upper() + words[1:] if re.match(r"[a-z]+([.,]$|[.,]? [a-z])", words) else words


def listed(names):
    names = list(dict.fromkeys(names))
    return ", ".join(f"`{name}`" for name in names[:6]) + (" and others" if len(names) > 6 else "")
