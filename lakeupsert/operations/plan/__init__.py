"""`plan`: what the next night will take, from what earlier nights took."""
