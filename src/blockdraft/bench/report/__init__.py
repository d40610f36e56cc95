"""Results as tables, plots and pages. Knows result files only, and no measurement.

`sections.py` lists which function makes the section of each kind of result; they stand in
`speed_sections.py`, `load_sections.py` and `summary.py`, and are made of what `section.py` offers.
`published.py` sets figures of others beside one's own, and `changes.py` two results of the same
measurement. `svg.py` draws. `documents.py` puts sections on pages.
"""
