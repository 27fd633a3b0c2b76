"""Who posts work to the engine and reads its tokens: requests, batches, sessions, beam search, streamers."""
