"""Many runs of one recipe: grids of settings times seeds, and the papers' figures as such grids.

grid        which settings, and what may not be swept
plan        every cell resolved, which cells share a run, what workers agree on
runs        one run of a sweep, in its folder, gone on with after a kill
crew        several processes on one machine
sweep       all of it, from a recipe to `sweep.json`
result      what a sweep found
statistics  medians, means, spreads
price       what all runs of a sweep cost together
page        sweep.html
figures     the papers' figures as files
"""
