"""Other people's trainers, one module each; a loop that can be written as `for epoch in run` needs none of them."""
