"""Lists on the command line: words with commas between."""

from bench.errors import UsageError


def split_words(option: str, text: str) -> list[str]:
    """Return the words of a list; an empty one is an error."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"got {option} {text!r}, needed at least one word, with commas between.")
    return words


def parse_counts(option: str, text: str) -> list[int]:
    """Return the whole numbers of a list."""
    words = split_words(option, text)
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"got {option} {text!r}, needed whole numbers, with commas between.")
    return [int(word) for word in words]
