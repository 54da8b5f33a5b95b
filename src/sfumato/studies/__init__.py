"""Many runs of one recipe: grids of settings times seeds, and the papers' figures as such grids.

grid        which settings, and what may not be swept
plan        every cell resolved, which cells share a run, what all processes agree on
sweep       all of it, from a recipe to `sweep.json`; its runs, each in its folder, gone on with after a kill
result      what a sweep found: medians, means, spreads
summary     from finished runs to that, and what all runs cost together
page        sweep.html
figures     the papers' figures as files; one of them, tuned and run
claims      whether it shows what its paper states
"""
