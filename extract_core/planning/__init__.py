"""What will be extracted and where every row goes, decided before the model runs."""
