"""What tests of lakeupsert are made of, published so that a backend of your own can be tested with it."""
