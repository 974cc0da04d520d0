"""Foreign formats, one small file each: source to trajectories, or trajectories to target. Installed as `trajstore.converters`."""
