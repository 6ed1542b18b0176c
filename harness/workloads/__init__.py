"""What engines are asked to do: request strategies, scripted scenarios, hostile drafters, and the lane that runs them."""
