"""A library for studies: cells that are measured once, tables and pictures made from them.

    cells     a piece of work each, with a file for its result; the same command resumes
    tables    records -> means and spreads -> sheets with Markdown and JSON
    report    files of a study, and the marked tables of a page
    pictures  one style, and the parts of a figure
    command   the options that all studies share

A study has its own cells, tables and pictures; nothing here knows them.
"""
