"""Five notebooks in four languages, from one source for each and the table of sentences."""
