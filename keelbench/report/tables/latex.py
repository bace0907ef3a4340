"""The LaTeX skin: a booktabs table that needs no retouching."""

import re
from collections.abc import Sequence

from keelbench.report.summary import BEST
from keelbench.report.tables.table import LATEX, Column, Table

ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "$": r"\$",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"$\sim$",
    "^": r"\textasciicircum{}",
    ">=": r"$\geq$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "–": "--",
}
"""What LaTeX would take as a command, or not have in its font."""


def latex(table: Table) -> str:
    """A floating table; the preamble needs ``\\usepackage{booktabs}``."""
    columns = [column for column in table.columns if column.in_papers]
    letters = "".join("r" if column.align == "right" else "l" for column in columns)
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_caption(table)}}}",
        rf"  \begin{{tabular}}{{@{{}}{letters}@{{}}}}",
        r"    \toprule",
        *_header(columns),
        r"    \midrule",
    ]
    for row, following in zip(table.rows, [*table.rows[1:], None], strict=True):
        texts = [escaped(column.text(row, LATEX)) for column in columns]
        if row.get("standing") == BEST:
            texts = [
                rf"{{\boldmath\textbf{{{text}}}}}" if column.is_emphasised else text
                for text, column in zip(texts, columns, strict=True)
            ]
        lines.append(f"    {' & '.join(texts)} \\\\")
        if following is not None and table.section(row) != table.section(following):
            lines.append(r"    \midrule")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text with LaTeX's special characters escaped; $formulas$ are left alone."""
    parts = text.split("$")
    if len(parts) % 2 == 0:
        return _escaped_text(text)
    return "$".join(
        part if position % 2 else _escaped_text(part) for position, part in enumerate(parts)
    )


def _escaped_text(text: str) -> str:
    result, position = [], 0
    while position < len(text):
        key = next((key for key in ESCAPES if text.startswith(key, position)), None)
        result.append(text[position] if key is None else ESCAPES[key])
        position += 1 if key is None else len(key)
    return "".join(result)


def _caption(table: Table) -> str:
    settings = table.caption.replace(" · ", ", ")
    sentences = [f"Maximum Tolerable LR at {settings}", *table.notes]
    text = " ".join(f"{line[0].upper()}{line[1:].rstrip('.')}." for line in sentences)
    text = text.replace(". * highest", ". $^{*}$ Highest")
    return escaped(re.sub(r"\b(\d[\d.]*)e(-?\d+)\b", r"$\1 \\times 10^{\2}$", text))


def _header(columns: Sequence[Column]) -> list[str]:
    """One line of names and, where any column has one, a line of units."""
    split = [column.header.partition("\n") for column in columns]
    names = " & ".join(escaped(name) for name, _, _ in split)
    units = " & ".join(escaped(unit) for _, _, unit in split)
    lines = [rf"    {names} \\"]
    return [*lines, rf"    {units} \\"] if any(unit for _, _, unit in split) else lines
