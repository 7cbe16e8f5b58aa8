"""Other systems' interfaces over Umbra's runs."""
