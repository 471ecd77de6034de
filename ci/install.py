"""``python -m ci.install ARGUMENTS``: ``pip install ARGUMENTS`` that says what it is doing, in one line that changes.

pip's own words are hundreds of lines, or with ``--quiet`` none for minutes. They are shown if it fails.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

_SAID = (
    (re.compile(r"Collecting (\S+)"), "looking for {}"),
    (re.compile(r"\s*Downloading (\S+ \([\d.]+ [MG]B\))"), "downloading {}"),
    (re.compile(r"\s*Building \w+ for (\S+)"), "building {}"),
    (re.compile(r"Installing collected packages: (.*)"), "unpacking {}"),
)
_WIDTH = 76


def describe(line: str) -> str | None:
    """Return what a line of pip's output says that takes time; None, if nothing."""
    for pattern, text in _SAID:
        if found := pattern.match(line):
            many = found[1].count(",") + 1
            return text.format(f"{many} packages" if many > 1 else found[1])
    return None


def install(arguments: Sequence[str], show: Callable[[str], None]) -> int:
    """Run pip, show what it does, and return its exit code; what it said goes to standard error if it fails."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            said.append(line)
            if text := describe(line):
                show(text)
    if pip.returncode:
        sys.stderr.write("\n" + "".join(said))
    return pip.returncode


def main(arguments: Sequence[str]) -> int:
    begin_s = time.monotonic()

    def show(text: str) -> None:
        # On a terminal each line takes the place of the last one; in a file there would be too many.
        if sys.stdout.isatty():
            print(f"\r  {text[:_WIDTH]:{_WIDTH}}", end="", flush=True)
        elif text.startswith(("downloading", "unpacking")):
            print(f"  {text}", flush=True)

    code = install(arguments, show)
    text = f"{'failed' if code else 'done'} after {time.monotonic() - begin_s:.0f} s"
    print(f"\r  {text:{_WIDTH}}" if sys.stdout.isatty() else f"  {text}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
