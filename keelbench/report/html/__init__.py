"""The report as one self-contained HTML file: no network, no scripts, light and dark."""

from keelbench.report.html.page import render_comparison, render_html

__all__ = ["render_comparison", "render_html"]
