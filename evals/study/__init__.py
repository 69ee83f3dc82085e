"""A library for studies: cells that are measured once, tables and pictures made from them.

    cells     a piece of work each, with a file for its result; the same command resumes
    run       a base and its specialists as named tensors, and the score of any weights
    kinds     what a cell measures, for any run
    command   the options that all studies share, and their order
    tables    records -> means and spreads -> sheets with Markdown and JSON
    pictures  one style, and the parts of a figure
    sheets    the tables and pictures of every benchmark
    report    files of a study, and the marked tables of a page

A benchmark has its own runs and cells, and sometimes tables of its own. Nothing here knows them.
"""
