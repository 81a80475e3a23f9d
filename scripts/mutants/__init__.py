"""The mutation tester behind ``make mutants``: small bugs, one at a time, that some test must see.

mutmut's operators make the mutants. Its runner imports and collects the tests anew for each of
them, leaves out every decorated function, and numbers its results by position. Here a process that
has imported and collected everything is forked per mutant, only the tests that reach the mutated
line run, the likeliest first, and results are kept by function and mutation.
"""
