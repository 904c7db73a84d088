"""Pictures and pages, for every package that draws. :mod:`lowtri.drawing` lists the methods of the core that are defined here.

Each file imports only from the files above it:

labels   labels of rows and columns: width, escapes, and how a text is split into tokens
svg      colours for light and dark screens, the SVG file, its texts
grids    the model of all pictures, grids of cells with labels, drawn as text and as SVG
pages    HTML for notebooks and pages of their own; JSON
files    pictures as files: SVG, HTML, and through matplotlib PNG and PDF
masks    masks as text and as SVG, and how many positions show a mask
caches   how long a key/value cache holds each position
engines  which engine runs a call, as a table
"""
