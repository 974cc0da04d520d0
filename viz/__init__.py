"""Looking at trajectories: a model of what is shown, and its front ends. Installed as `trajstore.viz`."""
