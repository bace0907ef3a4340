"""The skin for other programs: CSV with every field at full precision."""

import csv
import io

from keelbench.report.tables.table import Table


def csv_text(table: Table) -> str:
    """One line per row of the table; a value that does not exist is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, table.rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    return file.getvalue()
