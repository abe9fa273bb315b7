"""What a run leaves behind: JSON files, PNG plots, and one HTML file that needs nothing else."""
