"""What git tells of a change: the commit that it starts from, and the paths that it touches."""
import shutil
import subprocess
from pathlib import Path


def git(root, *arguments):
    """Returns what git prints, or None where it fails."""
    if not shutil.which("git"):
        return None
    run = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else None


def parent(root):
    """Returns the commit that a change starts from, or None where there is no history."""
    top = git(root, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root:
        return None
    head = git(root, "rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        base = git(root, "merge-base", "HEAD", main)
        if base and base != head:
            return base
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD~1")


def changed(root, since):
    """Returns the paths that differ from a commit or were never added, or None where git has no such commit."""
    names = git(root, "diff", "--name-only", since, "--")
    new = git(root, "ls-files", "--others", "--exclude-standard")
    return None if names is None else {Path(name) for name in names.split("\n") + (new or "").split("\n") if name}


def turn(root, turns):
    """Returns a number below `turns` that goes on by one with each commit; 0 where there is no history."""
    count = git(root, "rev-list", "--count", "HEAD")
    return int(count) % turns if count else 0
