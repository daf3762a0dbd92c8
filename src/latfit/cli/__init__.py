"""The command line: one file a verb. Verbs parse, call, print and choose the exit code; they compute nothing."""
