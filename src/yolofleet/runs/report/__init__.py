"""Files and screens of a run: folder, console, results, plots, report page."""
