"""Plain-text tables with aligned columns."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Returns one line of text per row, with every column padded to its widest cell.

    Two spaces separate the columns. Trailing spaces are removed.

    Args:
      rows: the cells of each row, including a header if there is one. A row may have fewer cells
        than the others: its line ends earlier.
      right: indices of the right-aligned columns. All other columns are left-aligned.
    """
    widths: list[int] = []
    for row in rows:
        for column, cell in enumerate(row):
            if column == len(widths):
                widths.append(0)
            widths[column] = max(widths[column], len(cell))

    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            if column in right:
                cells.append(cell.rjust(widths[column]))
            else:
                cells.append(cell.ljust(widths[column]))
        lines.append("  ".join(cells).rstrip())
    return lines
