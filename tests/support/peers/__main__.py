from tests.support.peers import main

main()
