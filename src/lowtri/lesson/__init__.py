"""The lesson: masked self-attention as one interactive HTML page per language, which works without network.

page       the page of a language: template, texts, numbers and scripts in one file
languages  what a page needs of a language besides its sentences (lowtri.sentences), and their markup as HTML
numbers    what lowtri computes and measures when a page is made, and the stored measurements

assets/    sections (HTML), style (CSS), script (JavaScript), programs (shown under figures), measured (JSON), models (weights)
"""
