"""Configuration of the checkpoint beside it: Qwen2 with multi-token-prediction layers."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, num_nextn_predict_layers=1, **kwargs):
        super().__init__(**kwargs)
        self.num_nextn_predict_layers = num_nextn_predict_layers
