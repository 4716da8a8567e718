"""The page of `report.py`: lines of results, what they mean, figures, tables, HTML."""
