"""The command ``lowtri``.

verbs     the verbs, and the packages that each needs
main      finds the verb, runs it, and turns every error into a message and an exit code
options   options that several verbs share, and the functions that print
terminal  the one function that writes for the command line
learn     explain, mask, lesson
models    generate
checks    audit, verify
machine   bench, doctor
"""
