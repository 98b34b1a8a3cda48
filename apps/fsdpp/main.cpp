#include "apps/fsdpp/run.h"

int main(int argc, char** argv) { return fsdpp::app::run(argc, argv); }
