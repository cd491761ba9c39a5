"""What a published row, and a whole run, must satisfy."""
