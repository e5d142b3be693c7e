"""The command line: `main` reads the words, one file per verb does the rest."""
