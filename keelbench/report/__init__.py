"""From stored records to tables, figures and pages: nothing here needs torch.

``summary`` turns records into one tidy DataFrame, a row per cell; everything else shows it:
``results_json`` (the stable JSON), ``tables`` (five skins of one table), ``plots``
(matplotlib figures), ``html`` (one self-contained page) and ``lane`` (one lane as text).
Import the module that is needed: importing this package loads neither pandas nor matplotlib.
"""
