"""The lesson: masked self-attention as one interactive HTML page per language, which works without network.

page       the page of a language: template, texts, numbers and scripts in one file
languages  the texts of a language, and the little markup that they may contain
numbers    what lowtri computes and measures when a page is made, and the stored measurements

assets/    sections (HTML), style (CSS), script (JavaScript), languages (texts), programs (shown under figures), measured (JSON)
"""
