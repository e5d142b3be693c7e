"""The command line: one file per verb, and the parser. Not here: what a verb does beyond reading words and printing
(cluster, doctor, observe)."""
