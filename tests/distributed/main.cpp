// One rank as a program of its own, for launchers and for what has to be there before LibTorch is.
extern "C" int pacer_play_rank(int count, char** words);

int main(int count, char** words) { return pacer_play_rank(count, words); }
