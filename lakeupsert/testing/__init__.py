"""The tools that test lakeupsert, published so that you can test your own backend with them."""
