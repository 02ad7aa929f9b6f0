"""Lines and modules of each package, and words of each document: ``make size``."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "node", "models", "bootstrap", "tests")
PRODUCT = PACKAGES[:-1]


def modules(package: str) -> list[Path]:
    """The Python files of a package."""
    return [path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts]


def documents() -> list[Path]:
    """Everything written for people."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])


def lines_of(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def table() -> Iterator[str]:
    """The rows to print."""
    total = [0, 0]
    yield f"{'package':<32} {'lines':>8} {'modules':>8} {'longest':>8}"
    for package in PACKAGES:
        sizes = {path: lines_of(path) for path in modules(package)}
        longest = max(sizes, key=sizes.__getitem__)
        yield (
            f"{package:<32} {sum(sizes.values()):>8,} {len(sizes):>8,} {sizes[longest]:>8,}"
            f"  {longest.relative_to(ROOT / package)}"
        )
        if package in PRODUCT:
            total = [total[0] + sum(sizes.values()), total[1] + len(sizes)]
        if package == PRODUCT[-1]:
            yield f"{'all of these':<32} {total[0]:>8,} {total[1]:>8,}"
    yield ""
    yield f"{'document':<32} {'words':>8}"
    words = {path: len(path.read_text("utf-8").split()) for path in documents()}
    for path, count in words.items():
        yield f"{path.relative_to(ROOT)!s:<32} {count:>8,}"
    yield f"{'all documents':<32} {sum(words.values()):>8,}"


if __name__ == "__main__":
    print("\n".join(table()))
