"""Parts of `speed.py`: ops and baselines, timing, compile times of layers, tables.

The script `speed.py` beside this folder has the same name. Python imports the folder: `import
speed` is this package.
"""
