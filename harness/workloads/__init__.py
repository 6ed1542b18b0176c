"""What engines are asked to do: request strategies, scripted scenarios, hostile drafters, and lanes that run them."""
