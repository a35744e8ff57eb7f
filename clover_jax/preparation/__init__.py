"""From conversations to prepared folders: previewed, regenerated, tokenised, features cached."""
