"""The two small language models of each of the lesson's pages: the texts that they read, their training, their storage."""
